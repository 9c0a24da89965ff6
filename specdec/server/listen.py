"""Where the server listens: a TCP port or a Unix socket, bound before the model is loaded, and TLS files, checked as early.

Owns: sockets and certificates. Must not know: the app or signals. Read next: serve.py.
"""

from __future__ import annotations

import errno
import os
import socket
import ssl
import stat
from dataclasses import dataclass
from pathlib import Path

from specdec.errors import ConfigError

BACKLOG = 2048
MAX_UDS_BYTES = 107  # of sun_path on Linux, its closing zero apart


@dataclass(frozen=True, slots=True, kw_only=True)
class Tls:
    """Paths of a PEM certificate chain and its key.

    Raises:
        ConfigError: one is missing, or the two cannot be used together.
    """

    certfile: str
    keyfile: str

    def __post_init__(self) -> None:
        for name, path in (("ssl_certfile", self.certfile), ("ssl_keyfile", self.keyfile)):
            if not Path(path).is_file():
                raise ConfigError(f"{name} is {path!r}, but there is no such file", hint="give the path of a PEM file")
        try:
            # The empty password makes an encrypted key an error; asked for on a terminal, it would hang a service.
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(self.certfile, self.keyfile, password="")
        except (ssl.SSLError, OSError) as error:
            message = f"ssl_certfile {self.certfile!r} and ssl_keyfile {self.keyfile!r} cannot be used: {error.strerror or error}"
            raise ConfigError(message, hint="both must be PEM, belong together, and the key must have no passphrase") from error


def tls_of(certfile: str | None, keyfile: str | None) -> Tls | None:
    """Return the files as one, None when neither is given.

    Raises:
        ConfigError: one without the other, or files that cannot be used.
    """
    if certfile is None and keyfile is None:
        return None
    if certfile is None or keyfile is None:
        given, missing = ("--ssl-keyfile", "--ssl-certfile") if certfile is None else ("--ssl-certfile", "--ssl-keyfile")
        raise ConfigError(f"{given} is given without {missing}, but TLS needs both", hint=f"add {missing} PATH, or drop {given}")
    return Tls(certfile=certfile, keyfile=keyfile)


def bind(host: str, port: int) -> socket.socket:
    """Return a bound, listening socket; port 0 picks a free one. Call it before the model is loaded.

    Raises:
        ConfigError: the address cannot be used; the message says why.
    """
    if not 0 <= port <= 65535:  # getaddrinfo would wrap it around
        raise ConfigError(f"port is {port}, but it must be in 0..65535")
    try:
        family, kind, proto, _, address = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        sock = socket.socket(family, kind, proto)
    except OSError as error:
        raise ConfigError(f"host {host!r} port {port} is not an address: {error}", hint="try --host 127.0.0.1 --port 8000") from error
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a restart need not wait for TIME_WAIT
        sock.bind(address)
        sock.listen(BACKLOG)
    except OSError as error:
        sock.close()
        if error.errno == errno.EADDRINUSE:
            raise ConfigError(
                f"port {port} on {host!r} is already in use", hint="stop the other program, or choose another --port"
            ) from error
        raise ConfigError(f"cannot listen on {host!r} port {port}: {error.strerror}", hint="choose another --host or --port") from error
    return sock


def bind_unix(path: str) -> socket.socket:
    """Return a listening Unix socket. The file of a server that is gone is replaced; any other file is left alone.

    Raises:
        ConfigError: the path cannot be used.
    """
    if len(os.fsencode(path)) > MAX_UDS_BYTES:
        raise ConfigError(f"uds is {path!r}, but the path of a Unix socket has at most {MAX_UDS_BYTES} bytes", hint="choose a shorter path")
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        _remove_stale(path)
        sock.bind(path)
        sock.listen(BACKLOG)
    except OSError as error:
        sock.close()
        raise ConfigError(
            f"cannot listen on uds {path!r}: {error.strerror}", hint="choose a path in a directory you can write to"
        ) from error
    except ConfigError:
        sock.close()
        raise
    return sock


def unbind(sock: socket.socket, uds: str | None = None) -> None:
    """Close a listening socket and remove its file, `uds`, where it has one. The server may have closed it already."""
    sock.close()
    if uds is not None:
        Path(uds).unlink(missing_ok=True)


def _remove_stale(path: str) -> None:
    try:
        mode = Path(path).stat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise ConfigError(f"uds is {path!r}, but a file that is no socket is there", hint="choose another path, or move the file away")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            Path(path).unlink()
            return
    raise ConfigError(f"uds {path!r} is already in use", hint="stop the other program, or choose another --uds")
