"""Shows the version of kdist in the title of every page; a hook of MkDocs."""

from typing import Any

from kdist.version import __version__


def on_config(config: Any) -> Any:
    config.site_name = f"kdist {__version__}"
    return config
