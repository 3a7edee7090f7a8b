"""The loop, in the order of Megatron-LM's."""

import sys
import time

import torch
from megatron.core.num_microbatches_calculator import get_num_microbatches
from megatron.core.rerun_state_machine import RerunDataIterator, get_rerun_state_machine

from . import ft_integration
from .async_utils import maybe_finalize_async_save
from .checkpointing import load_checkpoint, save_checkpoint
from .global_vars import get_args, get_signal_handler
from .initialize import initialize_megatron
from .utils import now, print_rank_0, print_rank_last


class Optimizer:
    """AdamW over gradients that are averaged over all ranks."""

    def __init__(self, model, args):
        self.model, self.clip, self.steps = model, args.clip_grad, 0
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)

    def prime(self):
        for parameter in self.model.parameters():
            state = self.optimizer.state[parameter]
            if not state:
                state.update(step=torch.tensor(0.0))
                state.update(exp_avg=torch.zeros_like(parameter), exp_avg_sq=torch.zeros_like(parameter))

    def zero_grad(self):
        self.optimizer.zero_grad()

    def step(self):
        for parameter in self.model.parameters():
            torch.distributed.all_reduce(parameter.grad, op=torch.distributed.ReduceOp.AVG)
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
        self.optimizer.step()
        self.steps += 1
        return True, norm.item(), None


def _samples(dataset, args):
    """This rank's microbatches from the consumed samples on."""
    dp, at = args.data_parallel_size, args.consumed_train_samples + args.rank * args.micro_batch_size
    while at < len(dataset):
        yield torch.stack([dataset[at + i] for i in range(args.micro_batch_size)])
        at += dp * args.micro_batch_size


def forward_backward(forward_step_func, data_iterator, model):
    losses = []
    for _ in range(get_num_microbatches()):
        loss = forward_step_func(data_iterator, model)
        (loss / get_num_microbatches()).backward()
        losses.append(loss.detach())
    return torch.stack(losses).mean()


def pretrain(dataset_provider, model_provider, forward_step_func):
    ft_integration.setup()
    initialize_megatron()
    args = get_args()
    model, optimizer, opt_param_scheduler = setup_model_and_optimizer(model_provider)
    data = dataset_provider(args.train_iters * args.global_batch_size)
    train_data_iterator = RerunDataIterator(iter(_samples(data, args)))
    print_rank_0(f"[after dataloaders are built] datetime: {now()} ")
    iteration = train(forward_step_func, model, optimizer, opt_param_scheduler, train_data_iterator)
    print_rank_0(f"[after training is done] datetime: {now()} ")
    if args.save and iteration != 0 and iteration % args.save_interval != 0:
        save_checkpoint(iteration, model, optimizer, opt_param_scheduler, 0, train_data_iterator=train_data_iterator)
    maybe_finalize_async_save(blocking=True, terminate=True)
    ft_integration.shutdown()
    torch.distributed.destroy_process_group()


def setup_model_and_optimizer(model_provider):
    args = get_args()
    model = model_provider()
    optimizer = Optimizer(model, args)
    if args.load is not None:
        load_checkpoint(model, optimizer, None)
    return model, optimizer, None


def train_step(forward_step_func, data_iterator, model, optimizer, opt_param_scheduler, config, iteration=None):
    machine = get_rerun_state_machine()
    while machine.should_run_forward_backward(data_iterator):
        optimizer.zero_grad()
        loss = forward_backward(forward_step_func, data_iterator, model)
    should_checkpoint, should_exit, exit_code = machine.should_checkpoint_and_exit()
    if should_exit:
        return {}, True, should_checkpoint, should_exit, exit_code, None, None, 0
    _successful, grad_norm, num_zeros = optimizer.step()
    torch.distributed.all_reduce(loss, op=torch.distributed.ReduceOp.AVG)
    return {"lm loss": loss}, 0, should_checkpoint, should_exit, exit_code, grad_norm, num_zeros, 0


def training_log(loss_dict, iteration, elapsed_s, grad_norm):
    args = get_args()
    print_rank_last(
        f" [{now()}] iteration {iteration:8d}/{args.train_iters:8d} | consumed samples: "
        f"{args.consumed_train_samples:12d} | elapsed time per iteration (ms): {elapsed_s * 1000:.1f} | "
        f"learning rate: {args.lr:.6E} | global batch size: {args.global_batch_size:5d} | "
        f"lm loss: {loss_dict['lm loss'].item():.6E} | loss scale: 1.0 | grad norm: {grad_norm:.3f} | "
        "number of skipped iterations:   0 | number of nan iterations:   0 |"
    )


def evaluate_and_print_results(prefix, *_args, **_kwargs):
    print_rank_last(f" validation loss at {prefix}")


def save_checkpoint_and_time(
    iteration,
    model,
    optimizer,
    opt_param_scheduler,
    flops,
    context,
    non_persistent_ckpt=False,
    train_data_iterator=None,
):
    save_checkpoint(
        iteration,
        model,
        optimizer,
        opt_param_scheduler,
        flops,
        context,
        non_persistent_ckpt=non_persistent_ckpt,
        train_data_iterator=train_data_iterator,
    )


def post_training_step_callbacks(*_args): ...


def checkpoint_and_decide_exit(model, optimizer, opt_param_scheduler, iteration, flops, context, train_data_iterator):
    args = get_args()

    def save():
        save_checkpoint_and_time(
            iteration, model, optimizer, opt_param_scheduler, flops, context, train_data_iterator=train_data_iterator
        )

    if args.exit_signal_handler and any(get_signal_handler().signals_received()):
        save()
        print_rank_0(f"[exiting program after receiving SIGTERM.] datetime: {now()} ")
        return True
    if args.save and args.save_interval and iteration % args.save_interval == 0:
        save()
    return False


def train(forward_step_func, model, optimizer, opt_param_scheduler, train_data_iterator):
    args = get_args()
    iteration, should_exit, exit_code = args.iteration, False, 0
    get_rerun_state_machine().current_iteration = iteration
    while iteration < args.train_iters:
        ft_integration.on_checkpointing_start()
        maybe_finalize_async_save(blocking=False)
        ft_integration.on_checkpointing_end(is_async_finalization=True)
        args.curr_iteration = iteration
        began_s = time.perf_counter()
        ft_integration.on_training_step_start()
        loss_dict, _skipped, should_checkpoint, should_exit, exit_code, grad_norm, _zeros, _logit = train_step(
            forward_step_func, train_data_iterator, model, optimizer, opt_param_scheduler, None, iteration=iteration
        )
        ft_integration.on_training_step_end()
        if should_checkpoint:
            save_checkpoint_and_time(
                iteration, model, optimizer, opt_param_scheduler, 0, None, train_data_iterator=train_data_iterator
            )
        if should_exit:
            break
        iteration += 1
        args.consumed_train_samples += args.global_batch_size
        training_log(loss_dict, iteration, time.perf_counter() - began_s, grad_norm)
        post_training_step_callbacks(model, optimizer, opt_param_scheduler, iteration)
        should_exit = checkpoint_and_decide_exit(
            model, optimizer, opt_param_scheduler, iteration, 0, None, train_data_iterator
        )
        if should_exit:
            break
    maybe_finalize_async_save(blocking=True, terminate=True)
    if should_exit:
        sys.exit(exit_code)
    return iteration
