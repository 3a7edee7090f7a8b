"""Arguments and the signal handler of this process."""

from .dist_signal_handler import DistributedSignalHandler

_GLOBAL_ARGS = None
_GLOBAL_SIGNAL_HANDLER = None


def get_args():
    assert _GLOBAL_ARGS is not None, "args is not initialized."
    return _GLOBAL_ARGS


def get_signal_handler():
    assert _GLOBAL_SIGNAL_HANDLER is not None, "signal handler is not initialized."
    return _GLOBAL_SIGNAL_HANDLER


def set_global_variables(args):
    global _GLOBAL_ARGS, _GLOBAL_SIGNAL_HANDLER
    _GLOBAL_ARGS = args
    if args.exit_signal_handler:
        _GLOBAL_SIGNAL_HANDLER = DistributedSignalHandler(args.exit_signal).__enter__()
