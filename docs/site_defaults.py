"""Shows defaults that are keys of the config, as `RunConfig.resume`, by their values; an extension of Griffe."""

from typing import Any

import griffe

from kdist.config import schema


class ConfigDefaults(griffe.Extension):
    """Replaces such defaults of functions before their documentation is rendered."""

    def on_function(self, *, func: griffe.Function, **_: Any) -> None:
        for parameter in func.parameters:
            owner, _, key = str(parameter.default).partition(".")
            if key and hasattr(getattr(schema, owner, None), key):
                parameter.default = repr(getattr(getattr(schema, owner), key))
