"""Every private name of TensorFlow, Keras and Hydra that kdist uses, each with the reason why no public name will do.

A test in `tests/unit/_compat` fails when a name changes its meaning. `make matrix` runs those tests with the lowest and
the highest versions that kdist supports. What works around a defect of TensorFlow's runtime is here, too.
"""
