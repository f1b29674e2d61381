"""The TLS context of the HTTP interface."""

from __future__ import annotations

import ssl

from engine.core.config import ServerConfig
from engine.core.errors import ConfigError


def tls_context(config: ServerConfig) -> ssl.SSLContext | None:
    """The context for accepted connections; None without a certificate. Raises ConfigError."""
    if not config.ssl_certfile:
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.set_alpn_protocols(["http/1.1"])
    try:
        # A function, as otherwise OpenSSL would ask for the password on the terminal.
        context.load_cert_chain(
            config.ssl_certfile, config.ssl_keyfile or None, password=lambda: config.ssl_keyfile_password
        )
    except OSError as error:  # SSLError is one
        files = " and ".join(filter(None, (config.ssl_certfile, config.ssl_keyfile)))
        reason = error.strerror if not isinstance(error, ssl.SSLError) else error.reason or str(error)
        raise ConfigError(
            f"TLS cannot use {files} ({reason}); give a certificate and its key as PEM files, and "
            "--ssl-keyfile-password if the key is encrypted"
        ) from None
    return context
