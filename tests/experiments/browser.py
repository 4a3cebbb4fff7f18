"""Chromium by the WebDriver protocol, in a few lines: Debian's packages chromium and chromium-driver."""

import base64
import json
import shutil
import socket
import subprocess
import time
import urllib.request


def missing():
    """Why there is no browser, or None."""
    absent = [name for name in ("chromium", "chromedriver") if shutil.which(name) is None]
    return f"no {' and no '.join(absent)} (Debian: apt install chromium chromium-driver)" if absent else None


class Browser:
    """A headless window of a given size; a phone's if asked."""

    def __init__(self, width, height, phone=False):
        self.options = {
            "binary": shutil.which("chromium"),
            "args": ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"],
        }
        if phone:
            metrics = {"width": width, "height": height, "pixelRatio": 2.0, "touch": True}
            self.options["mobileEmulation"] = {"deviceMetrics": metrics}
        else:
            self.options["args"].append(f"--window-size={width},{height}")

    def __enter__(self):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.driver = subprocess.Popen(
            [shutil.which("chromedriver"), f"--port={port}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        self.url = f"http://127.0.0.1:{port}"
        try:
            self._wait()
            capabilities = {"browserName": "chrome", "goog:chromeOptions": self.options}
            capabilities["goog:loggingPrefs"] = {"browser": "ALL"}
            session = self._call("POST", "/session", {"capabilities": {"alwaysMatch": capabilities}})
            self.url += f"/session/{session['sessionId']}"
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(self, *_):
        try:
            self._call("DELETE", "")
        finally:
            self._stop()

    def open(self, address):
        self._call("POST", "/url", {"url": address})

    def evaluate(self, expression):
        return self._call("POST", "/execute/sync", {"script": f"return {expression}", "args": []})

    def complaints(self):
        """What went to the console."""
        return [entry["message"] for entry in self._call("POST", "/se/log", {"type": "browser"})]

    def screenshot(self):
        return base64.b64decode(self._call("GET", "/screenshot"))

    def _stop(self):
        self.driver.terminate()
        self.driver.wait(timeout=20)

    def _wait(self):
        for _ in range(200):
            try:
                if self._call("GET", "/status")["ready"]:
                    return
            except OSError:
                pass
            time.sleep(0.1)
        raise RuntimeError("chromedriver does not answer")

    def _call(self, method, path, body=None):
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json"}, method=method)
        with urllib.request.urlopen(request, timeout=120) as response:
            return json.load(response)["value"]
