"""The command of node 0: it listens to those of the other machines, and keeps who is there."""

from __future__ import annotations

import queue
import secrets
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import wait
from pathlib import Path
from types import TracebackType

from weft.comm.address import RankAddress
from weft.comm.proven import Listener, heard
from weft.config.errors import STOPPED, ConfigError, ConfigErrors, RunError, show
from weft.elastic.nodes.link import Link
from weft.elastic.nodes.meeting import Where, bound_to
from weft.elastic.nodes.remote import Hello, Node
from weft.train.run_folder import NODES_FILE

LOOK_S = 0.2
PLAN_S = 300.0
"""How long a machine may take to look at a plan."""
LATE_S = 3.0
"""How long a head that refuses waits for those that were started with it."""


class Head:
    """A context manager: in it other machines may come. Its end is theirs.

    Args:
        folder: The run folder, which all machines see.
        own: This machine.
        quiet_s: A machine is lost that says nothing for so long; 0: never.
        tell: Says a line to the person who started the job.
    """

    def __init__(
        self,
        folder: Path,
        address: RankAddress,
        own: Hello,
        *,
        quiet_s: float,
        tell: Callable[[str], None],
    ) -> None:
        self.nodes: dict[int, Node] = {own.index: Node(own)}
        """Those that are there, and those that were, by their index."""
        self.code = 0
        """What all commands of the job end with."""
        self.refuses: Callable[[Hello], None] = lambda _: None
        """Raises ConfigError for a spare machine that the job has no use for."""
        self._folder, self._address, self._own = folder, address, own
        self._quiet_s, self._tell = quiet_s, tell
        self._came = queue.SimpleQueue[tuple[Hello, Link]]()
        self._listener: Listener | None = None
        self._began = False

    def __enter__(self) -> Head:
        secret = secrets.token_hex(32)
        host, _ = self._address.master
        try:
            self._listener = Listener(bound_to(host), secret, self._greet)
        except OSError as error:
            expected = "the name or address of this machine, node 0"
            raise ConfigError("MASTER_ADDR", host, expected, f"{error.strerror}.") from error
        Where(self._listener.port, secret).write(self._folder)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        if kind is not None:
            self.code = _code_of(error)
        until = time.monotonic() + LATE_S
        while not self._began and len(self.nodes) < self._address.world_size:
            with suppress(ConfigError):  # one problem is said already
                if self._take(LOOK_S) is None and time.monotonic() > until:
                    break
        for node in self.nodes.values():
            if node.link is not None:
                node.link.say(do="bye", code=self.code, text="")
                node.link.drop("the job is over")
        if self._listener is not None:
            self._listener.close()
        (self._folder / NODES_FILE).unlink(missing_ok=True)

    @property
    def there(self) -> Sequence[Node]:
        """In the order of their index."""
        return [node for _, node in sorted(self.nodes.items()) if node.is_there]

    def gather(self, timeout_s: float) -> None:
        """Wait for all machines that were started.

        Raises:
            ConfigError: some have not come in time, or differ from this one.
        """
        deadline = time.monotonic() + timeout_s
        wanted = range(self._address.world_size)
        while missing := [index for index in wanted if index not in self.nodes]:
            if (left_s := deadline - time.monotonic()) <= 0:
                expected = f"as many machines to come within {timeout_s:g} s"
                hint = f"Missing: {', '.join(f'node {index}' for index in missing)}. "
                hint += "Start the same command on every machine."
                raise ConfigError("WORLD_SIZE", len(wanted), expected, hint)
            self._take(min(left_s, LOOK_S))

    def offer(self, plan: str, ranks: Mapping[int, Sequence[int]]) -> None:
        """Let every machine look at the plan; ``ranks``: those that it would have, by its index.

        Raises:
            ConfigError: one cannot run it, or is gone.
        """
        self._began = True
        others = [node for node in self.nodes.values() if node.link is not None]
        for node in others:
            if node.index not in ranks:
                self.refuses(node.hello)
            _offer(node, plan, ranks.get(node.index, ()))
        deadline = time.monotonic() + PLAN_S
        for node in others:
            _await_answer(node, deadline)

    def look(self, plan: str) -> list[Node]:
        """Machines that have come since, and accepted the plan as a spare; they may be those that
        were lost. To be called again and again."""
        while (node := self._take(0.0)) is not None:
            _offer(node, plan, ())
        for node in self.nodes.values():
            node.look()
        return [node for node in self.there if node.is_late and node.is_ready]

    def _take(self, timeout_s: float) -> Node | None:
        """The next machine that has come; None: nobody has in time."""
        try:
            found = self._came.get(timeout=timeout_s) if timeout_s else self._came.get_nowait()
        except queue.Empty:
            return None
        hello, link = found
        before = self.nodes.get(hello.index)
        if before is not None and before.link is not None:
            before.look()
            if before.link.is_alive:
                return self._refused(hello, link, _at_work(before), timeout_s)
        try:
            self._refuse_unlike(hello)
            if self._began:
                self.refuses(hello)
            if before is not None and before.link is None:
                hint = "Give each machine a number of its own."
                raise ConfigError("RANK", hello.index, "a number above 0", hint)
        except ConfigError as error:
            if not self._began:
                self.nodes[hello.index] = Node(hello, link)
                raise
            return self._refused(hello, link, error, timeout_s)
        if before is not None:
            before.dismiss("its command was started again")
        node = Node(hello, link, is_late=self._began)
        self.nodes[hello.index] = node
        return node

    def _refused(
        self, hello: Hello, link: Link, error: ConfigError, timeout_s: float
    ) -> Node | None:
        """The next one after a machine that the job does without."""
        self._tell(f"node {hello.index} ({hello.name}) is not taken in: {error}")
        link.say(do="bye", code=2, text=str(error))
        link.drop("it was refused")
        return self._take(timeout_s)

    def _refuse_unlike(self, hello: Hello) -> None:
        for what in {**self._own.alike, **hello.alike}:
            mine, theirs = (alike.get(what) for alike in (self._own.alike, hello.alike))
            if mine != theirs:
                hint = f"Node {hello.index} differs. Start the same command, with the same files, "
                raise ConfigError(
                    what, theirs, f"{show(mine)}, as on node 0", f"{hint}on every machine."
                )

    def _greet(self, end: socket.socket) -> None:
        """Of one who knows the secret; in a thread of its own."""
        with suppress(TypeError):
            self._came.put((Hello(**heard(end)), Link(end, self._quiet_s)))
            return
        end.close()


def _code_of(error: BaseException | None) -> int:
    """What commands end with for it."""
    match error:
        case ConfigError() | ConfigErrors():
            return 2
        case RunError():
            return error.exit_code
        case KeyboardInterrupt():
            return STOPPED
    return 1


def _at_work(node: Node) -> ConfigError:
    """Another command has the number of a machine that is there."""
    hint = f"{node.words} is at work in this job. If it is to be replaced, end its command first; "
    hint += "otherwise give each machine a number of its own."
    return ConfigError("RANK", node.index, "a number that no machine has", hint)


def _await_answer(node: Node, deadline: float) -> None:
    """Return when it accepts the plan.

    Raises:
        ConfigError: it does not.
        RunError: it is gone.
    """
    assert node.link is not None, "the head asks no other"
    while not (node.is_ready or node.refusal):
        if not node.is_there or time.monotonic() > deadline:
            raise RunError(f"{node.words} is gone: {node.link.lost or 'it does not answer'}")
        wait([node.link.fileno()], LOOK_S)
        node.look()
    if node.refusal:
        raise ConfigError("", None, "", f"{node.words} refuses: {node.refusal}")


def _offer(node: Node, plan: str, ranks: Sequence[int]) -> None:
    if node.link is not None:
        node.link.say(do="plan", plan=plan, ranks=list(ranks))
