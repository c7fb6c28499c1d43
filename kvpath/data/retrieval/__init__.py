"""Tasks that ask for what stands far back, made from a seed: no text, no network.

examples      random numbers and sequences as pure functions of a seed and a number
task          what every task gives: a tokenizer of its own, and examples to train and to be tested on
recall        keys with values, then the keys again
passkey       digits somewhere in filler text, asked for at its end
evaluation    a task at several contexts, and at each of its numbers of keys or depths
"""

from kvpath.data.retrieval.passkey import Passkey
from kvpath.data.retrieval.recall import Recall
from kvpath.data.retrieval.task import Task

__all__ = ["Passkey", "Recall", "Task"]
