"""The config groups of kdist, as Hydra reads them: `pkg://kdist.conf`."""


def register() -> None:
    """Lets Hydra find the groups in an app of your own: `cluster=2ps2w`, `strategy`, `hooks`, `optimizer` and others.

    To be called before the function that `@hydra.main` decorates; may be called repeatedly.
    """
    # Not above: Hydra imports this package for its files.
    from kdist.cli import hydra_plugins

    hydra_plugins.register()
