"""A small GPT, text to train it on, and programs that train it: what the commands, examples and benchmarks share.

GPT, batches, standard_library   a model and its data, in plain torch
choose_device                    a GPU for each rank, a shared one, or the CPU
ThreeWays                        one backward fused, by torch's split and by ours: times and bytes
train, write_report              several processes, compared with one process and with torch's schedules
train_with_kills                 training in which processes are killed, compared with training undisturbed
"""

from sternway.demo._chaos import ChaosLog, ChaosOptions, train_with_kills
from sternway.demo._device import SHARED_GPU, choose_device
from sternway.demo._gpt import GPT, GPTBlock
from sternway.demo._report import write_report
from sternway.demo._text import batches, next_byte_loss, standard_library
from sternway.demo._three_ways import SplitTimes, ThreeWays
from sternway.demo._train import DemoOptions, DemoOutcome, train

__all__ = [
    "GPT",
    "SHARED_GPU",
    "ChaosLog",
    "ChaosOptions",
    "DemoOptions",
    "DemoOutcome",
    "GPTBlock",
    "SplitTimes",
    "ThreeWays",
    "batches",
    "choose_device",
    "next_byte_loss",
    "standard_library",
    "train",
    "train_with_kills",
    "write_report",
]
