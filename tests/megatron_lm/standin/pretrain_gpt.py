"""The stand-in's script: as Megatron-LM's, it knows nothing of who started it."""

import torch
from megatron.core.rerun_state_machine import get_rerun_state_machine
from megatron.training import get_args, pretrain

VOCABULARY, HIDDEN = 256, 32


class TinyModel(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(VOCABULARY, HIDDEN)
        self.hidden = torch.nn.Linear(HIDDEN, HIDDEN)
        self.out = torch.nn.Linear(HIDDEN, VOCABULARY)

    def forward(self, tokens):
        hidden = torch.nn.functional.dropout(self.embed(tokens), get_args().hidden_dropout, self.training)
        return self.out(torch.tanh(self.hidden(hidden)))


class MockDataset(torch.utils.data.Dataset):
    """Sample i is a pure function of i: a walk over the alphabet."""

    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int):
        steps = torch.arange(get_args().seq_length + 1)
        return (index * 7 + steps * (1 + index % 5)) % VOCABULARY


def forward_step(data_iterator, model):
    """Loss of one microbatch; its result is validated as Megatron-LM validates it."""
    tokens = next(data_iterator)
    scores = model(tokens[:, :-1])
    loss = torch.nn.functional.cross_entropy(scores.flatten(0, 1), tokens[:, 1:].flatten())
    get_rerun_state_machine().validate_result(
        result=loss.detach().clone(),
        rejection_func=torch.isnan,
        message="found NaN in local forward loss calculation",
        tolerance=0.0,
        fatal=True,
    )
    return loss


if __name__ == "__main__":
    pretrain(MockDataset, TinyModel, forward_step)
