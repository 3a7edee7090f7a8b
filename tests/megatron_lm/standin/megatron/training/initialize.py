"""Arguments, process group, seeds and the rerun machine, in Megatron-LM's order."""

import random
from datetime import timedelta

import numpy
import torch
from megatron.core import parallel_state
from megatron.core.num_microbatches_calculator import init_num_microbatches_calculator
from megatron.core.rerun_state_machine import (
    RerunDiagnostic,
    RerunErrorInjector,
    RerunMode,
    initialize_rerun_state_machine,
)

from .arguments import parse_args
from .global_vars import get_args, set_global_variables
from .utils import print_rank_0


def initialize_megatron():
    assert torch.cuda.is_available(), "Megatron requires CUDA."
    set_global_variables(parse_args())
    args = get_args()
    initialize_rerun_state_machine(
        mode=RerunMode(args.rerun_mode),
        error_injector=RerunErrorInjector(args.error_injection_rate, RerunDiagnostic(args.error_injection_type)),
    )
    torch.distributed.init_process_group(args.distributed_backend, timeout=timedelta(minutes=2))
    parallel_state.initialize_model_parallel(
        args.tensor_model_parallel_size,
        args.pipeline_model_parallel_size,
        context_parallel_size=args.context_parallel_size,
        expert_model_parallel_size=args.expert_model_parallel_size,
    )
    print_rank_0("> initialized the stand-in")
    init_num_microbatches_calculator(
        args.rank, None, args.global_batch_size, args.micro_batch_size, args.data_parallel_size
    )
    random.seed(args.seed)
    numpy.random.seed(args.seed)
    torch.manual_seed(args.seed)
