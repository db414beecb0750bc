"""In a guest: asks the agent on 127.0.0.1 and prints its answer as JSON, with `status`.

    guest_client.py PORT materialize ID START SIZE
    guest_client.py PORT unmaterialize ID [WAIT_S] [fence]
    guest_client.py PORT list

Only the standard library: imports take long on an emulated processor.
"""

from __future__ import annotations

import json
import sys
import urllib.error
import urllib.request
from typing import Any

_DOMAIN = "/redfish/v1/Systems/1/MemoryDomains/CXL"


def ask(url: str, path: str, body: Any = None, token: str = "") -> tuple[int, Any, Any]:
    """Status, headers and body of an answer."""
    headers = {"Content-Type": "application/json", "X-Auth-Token": token}
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url + path, data, headers)
    try:
        with urllib.request.urlopen(request, timeout=120) as answer:
            return answer.status, answer.headers, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, error.headers, json.load(error)


def main(port: str, action: str, *arguments: str) -> None:
    url = f"http://127.0.0.1:{port}"
    login = {"UserName": "driver", "Password": "secret"}
    _, headers, _ = ask(url, "/redfish/v1/SessionService/Sessions", login)
    token = headers["X-Auth-Token"]
    if action == "list":
        status, _, body = ask(url, f"{_DOMAIN}/MemoryChunks?$expand=.", token=token)
    elif action == "materialize":
        name, start, size = arguments
        request = {"AllocationId": name, "PhysicalStart": int(start), "SizeBytes": int(size)}
        path = f"{_DOMAIN}/Actions/Oem/CxlHost.MaterializeDAX"
        status, _, body = ask(url, path, request, token)
    else:
        name, wait_s = arguments[0], float(arguments[1]) if len(arguments) > 1 else 0
        request = {
            "AllocationId": name,
            "WaitSeconds": wait_s,
            "Fence": "fence" in arguments,
        }
        path = f"{_DOMAIN}/Actions/Oem/CxlHost.UnmaterializeDAX"
        status, _, body = ask(url, path, request, token)
    sys.stdout.write(json.dumps({"status": status, **body}))


if __name__ == "__main__":
    main(*sys.argv[1:])
