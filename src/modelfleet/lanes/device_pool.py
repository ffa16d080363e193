"""Devices of a fleet: those that the user named, or those of a Ray cluster."""

from collections.abc import Sequence

from modelfleet.devices import Device
from modelfleet.frameworks.adapter_protocol import Adapter
from modelfleet.members import Member
from modelfleet.workers import Place, places


class DevicePool:
    """Devices that a fleet may use.

    Args:
        devices: The devices that the user named. None: each framework chooses.
    """

    def __init__(self, devices: tuple[Device, ...] | None) -> None:
        self.devices = devices
        self.places: list[Place] = []
        """Places of a cluster, as of the last `refresh`."""

    @property
    def clustered(self) -> bool:
        """Return True if the devices belong to a cluster, by name or because this process is connected to one."""
        return places.means_ray(self.devices)

    def refresh(self) -> bool:
        """Ask the cluster, if there is one, which devices it has now. Return True if they have changed."""
        before = [place.name for place in self.places]
        self.places = places.ray_places(self.devices) if self.clustered else []
        return [place.name for place in self.places] != before

    def of(self, framework: Adapter) -> tuple[Device, ...]:
        """Return the devices that a framework's members may run on. Raises InputError if one does not exist."""
        if self.places:
            return tuple(Device("ray", int(place.name.partition(":")[2])) for place in self.places)
        return framework.choose(self.devices)

    def of_all(self, members: Sequence[Member]) -> tuple[Device, ...]:
        """Return the devices that any of the members may run on."""
        frameworks = {id(member.framework): member.framework for member in members}
        return tuple(dict.fromkeys(d for framework in frameworks.values() for d in self.of(framework)))

    def names(self, members: Sequence[Member]) -> list[str]:
        """Return the devices' names without asking a cluster."""
        if self.clustered:
            return [str(device) for device in self.devices or (Device("ray"),)]
        return [str(device) for device in self.of_all(members)]
