"""The library's client as the command line uses it: errors name options."""

from kvtier.library.client import Client
from kvtier.library.rendering.field_names import FieldNames

OPTION_NAMES = FieldNames(
    {
        "name": "NAME",
        "file": "FILE",
        "socket": "--socket",
        "server": "--server",
        "token": "KVTIER_TOKEN",
        "token_file": "--token-file",
        "ca_file": "--ca-file",
        "client_cert_file": "--client-cert-file",
        "client_key_file": "--client-key-file",
        "url": "--url",
        "api_key": "--api-key",
        "model": "--model",
        "system": "--system",
        "messages": "--messages",
        "messages=...": "--messages FILE",
        "text": "--text",
        "text=...": "--text FILE",
        "tokens=...": "--tokens FILE",
        "overwrite": "--force",
        "key_file": "--key-file",
        "namespace_id": "NAMESPACE",
        "selector": "-l",
    }
)
"""Options and arguments by the library's names, for those that its errors name."""


class CliClient(Client):
    """A client whose errors name options."""

    _NAMES = OPTION_NAMES
