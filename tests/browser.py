"""A headless Chromium, driven through pipes by the DevTools protocol: no driver, no server, no port."""

import base64
import json
import os
import shutil
import subprocess
import tempfile
from contextlib import contextmanager

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
_FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run", "--remote-debugging-pipe",
    "--disable-dev-shm-usage", "--host-resolver-rules=MAP * ~NOTFOUND",  # whatever a page asks the network for fails
)  # fmt: skip


@contextmanager
def browser():
    """Yield a browser."""
    to_read, to_write = os.pipe()
    from_read, from_write = os.pipe()

    def as_chromium_wants():  # it reads from 3 and writes to 4
        commands, answers = os.dup(to_read), os.dup(from_write)
        os.dup2(commands, 3)
        os.dup2(answers, 4)

    profile = tempfile.mkdtemp()
    command = [CHROMIUM, *_FLAGS, f"--user-data-dir={profile}", "about:blank"]
    process = subprocess.Popen(
        command, preexec_fn=as_chromium_wants, close_fds=False, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    os.close(to_read)
    os.close(from_write)
    try:
        with open(to_write, "wb", buffering=0) as write, open(from_read, "rb") as read:
            yield Browser(write, read)
    finally:
        process.terminate()
        process.wait(30)
        shutil.rmtree(profile, ignore_errors=True)


class Browser:
    """One tab; what it complains of is kept in ``complaints``."""

    def __init__(self, write, read):
        self._write, self._read, self._count, self._session = write, read, 0, None
        self.complaints, self._events = [], []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def show(self, path, width, height=900, scheme="light"):
        """Open a page at this width of the window, in light or dark; return when it is there."""
        self.complaints, self._events = [], []
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 500
        )
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        self.call("Page.navigate", url=path.resolve().as_uri())
        while "Page.loadEventFired" not in self._events:
            self._receive()

    def run(self, script):
        """Return the value of a script."""
        answer = self.call("Runtime.evaluate", expression=script, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def screenshot(self, path, height=None):
        """Write the page from its top, all of it or so many pixels."""
        size = self.call("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": height or size["height"], "scale": 1}
        answer = self.call("Page.captureScreenshot", captureBeyondViewport=True, clip=clip)
        path.write_bytes(base64.b64decode(answer["data"]))

    def call(self, method, **params):
        """Send a command and return its answer."""
        self._count += 1
        message = {"id": self._count, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        self._write.write(json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == self._count:
                assert "error" not in answer, answer
                return answer["result"]

    def _receive(self):
        data = bytearray()
        while not data.endswith(b"\0"):
            part = self._read.read1(1)
            assert part, "Chromium ended"
            data += part
        message = json.loads(data[:-1])
        method, params = message.get("method"), message.get("params", {})
        self._events.append(method)
        if method == "Runtime.exceptionThrown" or (method == "Runtime.consoleAPICalled" and params["type"] != "log"):
            self.complaints.append(params)
        if method == "Log.entryAdded" and params["entry"]["level"] in ("warning", "error"):
            self.complaints.append(params["entry"]["text"])
        if method == "Network.requestWillBeSent" and not params["request"]["url"].startswith(("file:", "data:")):
            self.complaints.append(params["request"]["url"])
        return message
