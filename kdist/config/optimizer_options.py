"""The keys `optimizer.*` of a config."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Optional

from kdist.config import checks
from kdist.errors import ConfigError


@dataclass
class OptimizerConfig:
    """Overrides the model's optimizer, or compiles the model; null keeps the model's setting."""

    name: Optional[str] = None
    """A Keras optimizer, for example `adam` or `sgd`."""

    learning_rate: Any = None
    """A number, or a schedule by its `_target_`."""

    momentum: Optional[float] = None
    """SGD, RMSprop: momentum."""

    nesterov: Optional[bool] = None
    """SGD: Nesterov momentum."""

    beta_1: Optional[float] = None
    """Adam family: decay of the first moment."""

    beta_2: Optional[float] = None
    """Adam family: decay of the second moment."""

    rho: Optional[float] = None
    """RMSprop, Adadelta: decay of the squared gradient."""

    epsilon: Optional[float] = None
    """Added to the denominator."""

    weight_decay: Optional[float] = None
    """Decoupled weight decay."""

    use_ema: Optional[bool] = None
    """Keeps a moving average of each variable; the model gets the averages at the end."""

    ema_momentum: Optional[float] = None
    """Weight of the old average in the new one."""

    clipnorm: Optional[float] = None
    """Clips the norm of each gradient."""

    global_clipnorm: Optional[float] = None
    """Clips the norm of all gradients together."""

    clipvalue: Optional[float] = None
    """Clips each value of each gradient."""

    def __post_init__(self) -> None:
        rate = self.learning_rate
        if isinstance(rate, (int, float)):
            checks.check_more_than_zero("optimizer.learning_rate", float(rate))
        elif isinstance(rate, str):
            raise ConfigError(f"optimizer.learning_rate={rate}: must be a number or a schedule (_target_)")
