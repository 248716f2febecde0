"""Load a `.dsmodel` bundle and generate text with it."""

from dsc.runtime.engine import Engine
from dsc.runtime.generate import SpeculativeModel
from dsc.runtime.load import load
from dsc.runtime.request import Chunk, GenerationResult
from dsc.runtime.sampling import SamplingParams
from dsc.runtime.speculator import SpeculationOptions
from dsc.runtime.stats import GenerationStats
from dsc.runtime.ticket import Ticket

__all__ = [
    "Chunk",
    "Engine",
    "GenerationResult",
    "GenerationStats",
    "SamplingParams",
    "SpeculationOptions",
    "SpeculativeModel",
    "Ticket",
    "load",
]
