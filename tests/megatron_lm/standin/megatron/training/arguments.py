"""The flags that outlast gives, and the few that the stand-in heeds; the others of Megatron-LM are passed over."""

import argparse
import os
import signal


def parse_args():
    parser = argparse.ArgumentParser(allow_abbrev=False)
    for name, kind, value in (
        ("micro-batch-size", int, 1),
        ("global-batch-size", int, 1),
        ("seq-length", int, 16),
        ("train-iters", int, 1),
        ("tensor-model-parallel-size", int, 1),
        ("pipeline-model-parallel-size", int, 1),
        ("context-parallel-size", int, 1),
        ("expert-model-parallel-size", int, 1),
        ("lr", float, 1e-3),
        ("clip-grad", float, 1.0),
        ("hidden-dropout", float, 0.0),
        ("seed", int, 1234),
        ("log-interval", int, 1),
        ("save", str, None),
        ("load", str, None),
        ("save-interval", int, None),
        ("ckpt-step", int, None),
        ("ckpt-format", str, "torch_dist"),
        ("distributed-backend", str, "nccl"),
        ("rerun-mode", str, "validate_results"),
        ("error-injection-rate", int, 0),
        ("error-injection-type", str, "transient_error"),
    ):
        parser.add_argument(f"--{name}", type=kind, default=value)
    for name in ("exit-signal-handler", "exit-on-missing-checkpoint", "use-distributed-optimizer"):
        parser.add_argument(f"--{name}", action="store_true")
    args, _others = parser.parse_known_args()
    args.exit_signal = signal.SIGTERM
    args.rank, args.world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    sizes = args.tensor_model_parallel_size * args.pipeline_model_parallel_size * args.context_parallel_size
    args.data_parallel_size = args.world_size // sizes
    args.iteration = args.consumed_train_samples = 0
    return args
