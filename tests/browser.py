"""A headless Chromium for tests, driven over its DevTools protocol with websocket-client (which Jupyter brings)."""

import json
import shutil
import subprocess
import tempfile
import urllib.request
from pathlib import Path

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)


class Browser:
    """One page of a browser without a window. Use as a context manager."""

    def __init__(self):
        self.profile = tempfile.TemporaryDirectory()
        self.process = subprocess.Popen(
            [
                CHROMIUM,
                "--headless=new",
                "--no-sandbox",  # tests may run as root
                "--disable-gpu",
                "--disable-dev-shm-usage",
                "--no-first-run",
                "--remote-debugging-port=0",
                "--remote-allow-origins=*",
                f"--user-data-dir={self.profile.name}",
                "about:blank",
            ],
            stderr=subprocess.PIPE,
            text=True,
        )
        for line in self.process.stderr:  # until it says where it listens
            if "DevTools listening on" in line:
                break
        else:
            raise RuntimeError("Chromium did not start")
        port = line.split("127.0.0.1:")[1].split("/")[0]
        from websocket import create_connection

        with urllib.request.urlopen(f"http://127.0.0.1:{port}/json") as answer:
            page = next(one for one in json.load(answer) if one["type"] == "page")
        self.socket = create_connection(page["webSocketDebuggerUrl"], timeout=60)
        self.number, self.events = 0, []
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.socket.close()
        self.process.terminate()
        self.process.wait(30)
        self.process.stderr.close()
        self.profile.cleanup()

    def call(self, method: str, **parameters) -> dict:
        """One command; events that come meanwhile are kept."""
        self.number += 1
        self.socket.send(json.dumps({"id": self.number, "method": method, "params": parameters}))
        while True:
            message = json.loads(self.socket.recv())
            if message.get("id") == self.number:
                if "error" in message:
                    raise RuntimeError(f"{method}: {message['error']}")
                return message["result"]
            self.events.append(message)

    def open(self, url: str) -> None:
        """Load a page and wait for its load event."""
        self.events.clear()
        self.call("Page.navigate", url=url)
        while not any(event["method"] == "Page.loadEventFired" for event in self.events):
            self.events.append(json.loads(self.socket.recv()))

    def run(self, expression: str):
        """The value of a JavaScript expression; a promise is awaited."""
        answer = self.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(answer["exceptionDetails"])
        return answer["result"].get("value")

    def complaints(self) -> list[str]:
        """Errors of the page since it was opened: console, scripts, files that did not load."""
        found = []
        for event in self.events:
            what = event.get("params", {})
            if event["method"] == "Runtime.exceptionThrown":
                found.append(str(what["exceptionDetails"]))
            elif event["method"] == "Runtime.consoleAPICalled" and what["type"] in ("error", "warning", "assert"):
                found.append(str(what["args"]))
            elif event["method"] == "Log.entryAdded" and what["entry"]["level"] in ("error", "warning"):
                found.append(f"{what['entry']['text']} {what['entry'].get('url', '')}")
            elif event["method"] == "Network.loadingFailed" and not what.get("canceled"):
                found.append(what["errorText"])
        return found

    def requested(self) -> list[str]:
        """The addresses that the page asked for."""
        return [e["params"]["request"]["url"] for e in self.events if e["method"] == "Network.requestWillBeSent"]

    def size(self, width: int, height: int) -> None:
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=True)

    def picture(self, path: Path) -> None:
        import base64

        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot")["data"]))
