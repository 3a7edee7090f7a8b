"""No asynchronous saves here; the names are Megatron-LM's."""


def init_persistent_async_worker(): ...


def maybe_finalize_async_save(blocking=False, terminate=False): ...
