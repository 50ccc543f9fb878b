"""The only code that writes: `run` carries out a plan in bounded memory, with threads, a journal and the commit last."""

from ckpttools.execute.records import Executed, WrittenCarry, WrittenTensor
from ckpttools.execute.run import run

__all__ = ["Executed", "WrittenCarry", "WrittenTensor", "run"]
