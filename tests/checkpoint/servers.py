"""A real S3 server and a real SFTP server on loopback, whose faults a test chooses."""

import asyncio
import logging
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import asyncssh
import pytest
from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from moto.s3.models import s3_backends
from moto.server import ThreadedMotoServer

from weft.checkpoint.place import place_of
from weft.checkpoint.remote.files import open_files
from weft.checkpoint.remote.path import RemotePath

BUCKET = "weft-tests"
ACCOUNT = "123456789012"


class S3:
    """The server, and what it does to requests."""

    def __init__(self, server: ThreadedMotoServer) -> None:
        self.server = server
        self.bucket = BUCKET
        self.requests: list[tuple[str, str]] = []
        """(method, path and query) of all that came."""
        self.refuses: Callable[[str, str], bool] = lambda method, path: False
        """Answer "access denied" to such a request."""
        self.hangs_up: Callable[[str, str], bool] = lambda method, path: False
        """Give no answer to it."""
        self.holds: Callable[[str, str], bool] = lambda method, path: False
        """Answer it only once it is ``released``."""
        self.held: list[str] = []
        """The paths of those that wait, or did."""
        self.answered: list[str] = []
        """Of those, what has been carried out since."""
        self.released = threading.Event()
        self.environment: dict[str, str] = {}

    @property
    def url(self) -> str:
        host, port = self.server.get_host_and_port()
        return f"http://{host}:{port}"

    def place(self, prefix: str = "runs/one") -> RemotePath:
        found = place_of(f"s3://{self.bucket}/{prefix}")
        assert isinstance(found, RemotePath)
        return found

    def damage(self, key: str, change: Callable[[bytearray], object]) -> None:
        """Change the bytes of an object behind everybody's back."""
        backend = s3_backends[ACCOUNT]["aws"]
        data = bytearray(backend.get_object(self.bucket, key).value)
        change(data)
        backend.put_object(self.bucket, key, bytes(data))

    def names(self) -> list[str]:
        return sorted(s3_backends[ACCOUNT]["aws"].buckets[self.bucket].keys)

    def unfinished(self) -> list[str]:
        """Uploads that were begun and neither completed nor aborted."""
        return list(s3_backends[ACCOUNT]["aws"].buckets[self.bucket].multiparts)


@contextmanager
def s3_server(monkeypatch: pytest.MonkeyPatch) -> Iterator[S3]:
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    made = S3(server)
    plain = DomainDispatcherApplication(create_backend_app)

    def watched(environ: dict, start_response: Callable) -> object:
        method, path = environ["REQUEST_METHOD"], environ["PATH_INFO"]
        query = environ.get("QUERY_STRING", "")
        made.requests.append((method, f"{path}?{query}" if query else path))
        if made.holds(method, path):
            made.held.append(path)
            made.released.wait()
            try:
                return list(plain(environ, start_response))
            finally:
                made.answered.append(path)
        if made.refuses(method, made.requests[-1][1]):
            start_response("403 Forbidden", [("Content-Type", "application/xml")])
            return [b"<Error><Code>AccessDenied</Code><Message>Access Denied</Message></Error>"]
        if made.hangs_up(method, made.requests[-1][1]):
            environ["werkzeug.socket"].shutdown(socket.SHUT_RDWR)
            raise ConnectionError("hung up")
        return plain(environ, start_response)

    with monkeypatch.context() as patched:
        patched.setattr(
            "moto.moto_server.threaded_moto_server.DomainDispatcherApplication", lambda _: watched
        )
        server.start()
        server.get_host_and_port()
    backend = s3_backends[ACCOUNT]["aws"]
    backend.reset()
    backend.create_bucket(BUCKET, "us-east-1")
    made.environment = {
        "AWS_ENDPOINT_URL": made.url,
        "AWS_ACCESS_KEY_ID": "key-of-tests",
        "AWS_SECRET_ACCESS_KEY": "secret-of-tests",
        "AWS_REGION": "us-east-1",
    }
    for name, value in made.environment.items():
        monkeypatch.setenv(name, value)
    open_files.cache_clear()
    try:
        yield made
    finally:
        made.released.set()
        server.stop()
        open_files.cache_clear()


class Sftp:
    """The server: what it shows is ``folder``."""

    def __init__(self, folder: Path, home: Path) -> None:
        self.folder = folder
        self.port = 0
        self._home = home
        self._loop = asyncio.new_event_loop()
        self._server: asyncssh.SSHAcceptor | None = None
        self._connections: list[asyncssh.SSHServerConnection] = []
        self._key = asyncssh.generate_private_key("ssh-ed25519")
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    def start(self) -> None:
        async def listen() -> asyncssh.SSHAcceptor:
            return await asyncssh.listen(
                "127.0.0.1",
                self.port,
                server_host_keys=[self._key],
                acceptor=self._connections.append,
                authorized_client_keys=str(self._home / "authorized_keys"),
                sftp_factory=lambda channel: asyncssh.SFTPServer(channel, chroot=self.folder),
            )

        self._server = asyncio.run_coroutine_threadsafe(listen(), self._loop).result(60)
        self.port = self._server.get_port()
        known = f"[127.0.0.1]:{self.port} {self._key.export_public_key().decode()}"
        (self._home / ".ssh" / "known_hosts").write_text(known)

    def stop(self) -> None:
        server = self._server
        assert server is not None

        async def end() -> None:
            server.close()
            for connection in self._connections:
                connection.abort()
                await connection.wait_closed()
            self._connections.clear()
            await server.wait_closed()

        asyncio.run_coroutine_threadsafe(end(), self._loop).result(60)

    def end(self) -> None:
        self.stop()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(60)
        self._loop.close()

    def place(self, path: str = "runs/one") -> RemotePath:
        found = place_of(f"sftp://trainer@127.0.0.1:{self.port}/{path}")
        assert isinstance(found, RemotePath)
        return found


@contextmanager
def sftp_server(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Sftp]:
    """``folder``: an empty one; the server's files, and the home of the user that logs in."""
    home, shown = folder / "home", folder / "shown"
    (home / ".ssh").mkdir(parents=True)
    shown.mkdir()
    key = asyncssh.generate_private_key("ssh-ed25519")
    key.write_private_key(str(home / ".ssh" / "id_ed25519"))
    key.write_public_key(str(home / "authorized_keys"))
    monkeypatch.setenv("HOME", str(home))
    open_files.cache_clear()
    made = Sftp(shown, home)
    made.start()
    try:
        yield made
    finally:
        made.end()
        open_files.cache_clear()
