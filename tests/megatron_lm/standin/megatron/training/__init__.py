from .global_vars import get_args
from .training import pretrain

__all__ = ["get_args", "pretrain"]
