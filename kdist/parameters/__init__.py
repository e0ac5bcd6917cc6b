"""The values that training changes, on parameter servers or in this process.

`placement` decides which server holds which variable, `transport` how values travel, `optimizer` how gradients are
applied. `store` joins them: pull, push, read, write.
"""
