"""What the rest of Weft may ask of a device family. One file a family implements it.

Families are looked up where plans are made, so torch is imported only inside methods.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple, TypedDict

from weft.cluster.cluster import Chip

if TYPE_CHECKING:
    import torch
    from torch._C._distributed_c10d import Backend, ProcessGroup, Store

PointToPoint = Literal["none", "ordered", "tagged"]
"""How a library of collectives sends from rank to rank: not at all; so that messages of one group
arrive in the order in which they were sent; or so that tags tell them apart as well."""


class Joining(TypedDict):
    """What a rank that joins a job says of its library of collectives; see ``Platform``."""

    backend: str
    build: str
    point_to_point: PointToPoint


class Queues(NamedTuple):
    """How many queues of the hardware the streams of a process share."""

    variable: str
    """Of the environment: it says how many, before the device is first used."""
    usual: int
    """Without it."""
    most: int


class Platform(ABC):
    """One family of devices. Everything that differs between vendors sits behind this."""

    name: str
    """As in ``StagePlan.device``, and as PyTorch names the type of device."""
    order: int = 100
    """Place where families are listed."""
    detects_chips: bool = False
    """``chips`` finds every one of the machine."""
    collective_backend: str
    """Native backend of ``torch.distributed``; "none": all its groups go through host memory."""
    point_to_point: PointToPoint = "ordered"
    """What that backend does with messages; "none": they go through host memory."""

    queues: Queues | None = None
    """None: streams never hold one another up."""
    is_host: bool = False
    """Tensors lie in the host's memory and are there when a call returns: reading never waits."""
    has_varlen: bool = False
    """PyTorch's attention over sequences of unequal lengths computes on it, and gives logarithms of
    sums."""
    has_grouped: bool = False
    """PyTorch's products of groups of rows, each with a matrix of its own, compute on it."""
    collective_kernels: Sequence[str] = ()
    """One of these is in the name, in small letters, of each kernel of ``collective_backend``."""
    compiles: bool = False
    """PyTorch's compiler makes steps on it so much faster that blocks are compiled by default."""

    has_tf32: bool = False
    """Some of its devices can round what fp32 products multiply to TF32, and be faster."""

    def chips(
        self,
        environment: Mapping[str, str],  # noqa: ARG002
        *,
        timeout_s: float,  # noqa: ARG002
        problems: list[str],  # noqa: ARG002
    ) -> Iterator[Chip]:
        """Accelerators of this family that this process may use, without torch.

        A driver's tool that takes longer than ``timeout_s`` is given up. What cannot be found out
        is added to ``problems``, in words.
        """
        yield from ()

    def build(self) -> str:
        """The build of ``collective_backend``: ranks whose words differ share no group of it."""
        return ""

    def joining(self) -> Joining:
        """How a rank on this family joins the others."""
        return Joining(
            backend=self.collective_backend, build=self.build(), point_to_point=self.point_to_point
        )

    def versions(self) -> Mapping[str, str]:
        """What else ranks may differ in that nobody has to make alike, in words."""
        return {}

    @abstractmethod
    def available(self) -> bool:
        """At least one device of the family can be used here."""

    def why_not_available(self) -> str:
        """What the driver or PyTorch says, in words; empty where nothing is known."""
        return ""

    @abstractmethod
    def device(self, local_rank: int) -> torch.device:
        """The device of the ``local_rank``-th process on this machine, made current."""

    def has_fp8(self, chip: Chip) -> bool:  # noqa: ARG002
        """``multiplies_fp8`` on such a chip, as far as its data sheet says; without torch."""
        return False

    def multiplies_fp8(self) -> bool:
        """PyTorch's product of factors in eight bits computes on the devices of this process, and
        faster than one of bf16."""
        return False

    def multiplies_fp8_by_group(self) -> bool:
        """Likewise one of consecutive rows with a matrix of each of several; of E4M3 alone."""
        return False

    def compiles_fp8(self) -> bool:
        """Compiled code rounds to eight bits as PyTorch's operations do, to the bit."""
        return False

    def multiply_fp32(self, *, tf32: bool) -> None:  # noqa: ARG002
        """Products of fp32 numbers in this process: in TF32, or with all bits whatever
        PyTorch would take by itself. TF32 is asked for only where ``has_tf32``."""
        return

    def page_locked(self, num_bytes: int) -> torch.Tensor:
        """Bytes of the host at zero that a device reads and writes by itself, beside what both
        compute. Where the system locks no more it is memory like any other, which is slower."""
        import torch

        return torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=not self.is_host)

    @abstractmethod
    def synchronize(self) -> None:
        """Wait until queued work is done."""

    @abstractmethod
    def peak_memory_gib(self) -> float:
        """Most memory this process has held so far: device memory, or resident memory on CPU."""

    def memory_history(self) -> Callable[[Path], None] | None:
        """Note from now on what takes and frees memory, and from where in the code.

        Returns what writes it down, in the form that PyTorch's own viewer reads, and ends it; None
        where PyTorch offers no such thing for the family.
        """
        return None

    def open_group(
        self, backend: str, store: Store, number: int, size: int, timeout: timedelta
    ) -> ProcessGroup:
        """A process group of a backend that PyTorch's own registry knows.

        Its ``size`` members call this at the same time, each with its own ``number`` and a store
        where nobody else meets.
        """
        import torch
        import torch.distributed as dist
        from torch._C._distributed_c10d import ProcessGroup, _DistributedBackendOptions

        plugin = dist.Backend._plugins[backend.upper()]
        if plugin.extended_api:
            options = _DistributedBackendOptions()
            options.store, options.timeout = store, timeout
            options.group_rank, options.group_size = number, size
            made = plugin.creator_fn(options, None)
        else:
            made = plugin.creator_fn(store, number, size, timeout)
        assert made is not None, f"backend {backend} opened no group"
        device = torch.device(self.name)
        return made if isinstance(made, ProcessGroup) else group_of(made, backend, store, device)

    def open_channel(
        self, backend: str, store: Store, number: int, size: int, timeout: timedelta
    ) -> ProcessGroup:
        """``open_group`` for messages from rank to rank alone, which nothing should hold up."""
        return self.open_group(backend, store, number, size, timeout)


def group_of(backend: Backend, name: str, store: Store, device: torch.device) -> ProcessGroup:
    """A process group that belongs to nobody but its owner, for tensors of ``device`` and host."""
    import torch
    import torch.distributed as dist
    from torch._C._distributed_c10d import ProcessGroup

    kind = dist.Backend.backend_type_map.get(name, ProcessGroup.BackendType.CUSTOM)
    group = ProcessGroup(store, backend.rank(), backend.size())
    group._set_default_backend(kind)
    for each in {device.type, "cpu"}:
        group._register_backend(torch.device(each), kind, backend)
    return group
