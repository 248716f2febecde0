"""The resource-aware scheduler at start (RAS): first window and draft model by what the device has."""

from __future__ import annotations

from dataclasses import dataclass

from dsc.bundle_schema.dflash_config import DflashConfig, ResourceProfile
from dsc.runtime.costs import cpu_name
from dsc.runtime.host import SessionSettings
from dsc.runtime.host_cpus import allowed_cpus
from dsc.runtime.host_memory import memory_limit

_GIB = 2**30


@dataclass(frozen=True)
class DeviceFacts:
    """What a profile is chosen by.

    Attributes:
        memory_nbytes: of the device, or of the machine for the CPU; None when the system does not say.
        n_cores: CPUs that this process may use.
    """

    provider: str
    name: str
    memory_nbytes: int | None
    n_cores: int

    def __str__(self) -> str:
        memory = "memory not known" if self.memory_nbytes is None else f"{self.memory_nbytes / _GIB:.1f} GiB"
        return f"{self.name}, {memory}, {self.n_cores} cores"


def device_facts(settings: SessionSettings) -> DeviceFacts:
    """Of the device that these settings run on."""
    if settings.provider == "cpu":
        return DeviceFacts("cpu", cpu_name(), memory_limit(), allowed_cpus())
    return DeviceFacts(settings.provider, settings.device, settings.device_memory, allowed_cpus())


def choose_profile(config: DflashConfig, facts: DeviceFacts) -> ResourceProfile | None:
    """The profile with the most memory, then cores, of those that the device fulfils."""
    fitting = [
        row
        for row in config.profiles
        if row.provider == facts.provider
        and row.min_cores <= facts.n_cores
        and row.min_memory_gib * _GIB <= (facts.memory_nbytes or 0)
    ]
    return max(fitting, key=lambda row: (row.min_memory_gib, row.min_cores), default=None)


def apply_profile(config: DflashConfig, profile: ResourceProfile | None) -> DflashConfig:
    """The configuration that starts with the profile's window, as far as its own range allows."""
    if profile is None:
        return config
    window = min(max(profile.window, config.windows.min), config.windows.max)
    return config.model_copy(update={"windows": config.windows.model_copy(update={"default": window})})


def describe_profile(config: DflashConfig, profile: ResourceProfile | None, facts: DeviceFacts) -> str:
    """What was decided, for the statistics."""
    if profile is None:
        source = "measured costs" if config.costs else "the configuration"
        return f"no profile for {facts}: windows from {source}"
    draft = "" if profile.draft else ", no draft model"
    return f"{profile.name} for {facts}: first window {config.windows.default}{draft}"
