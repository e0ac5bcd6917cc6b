"""The config groups of kdist, as Hydra reads them: `pkg://kdist.conf`."""
