"""outlast keeps a Megatron run on a Slurm cluster training through faults. The code lies in the five linked folders."""

__version__ = "0.1.0"
