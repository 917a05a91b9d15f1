"""A headless Chromium for the tests of the page, driven by selenium."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from filelock import FileLock, Timeout
from selenium import webdriver
from selenium.common.exceptions import NoSuchElementException, StaleElementReferenceException
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.remote.webelement import WebElement

from tests.stub_cluster import wait_until

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
DRIVER_FOLDERS = ("/usr/lib/chromium", "/usr/lib/chromium-browser", os.environ.get("CHROMEWEBDRIVER", ""))
PACKAGES = ("chromium", "chromium-driver")
"""Of Debian. They depend on fontconfig, and that on a font."""
INSTALL_S = 300.0
LOCK_S = 400.0


class Programs(NamedTuple):
    browser: str
    driver: str


def find_programs() -> Programs | None:
    """Those of this machine that start: Ubuntu's `chromium-browser` may be a script that asks for a snap."""
    path = os.pathsep.join([os.environ.get("PATH", os.defpath), *filter(None, DRIVER_FOLDERS)])
    driver = shutil.which("chromedriver", path=path)
    browsers = filter(None, map(shutil.which, BROWSERS))
    browser = next((found for found in browsers if _starts(found)), None)
    return Programs(browser, driver) if browser and driver and _starts(driver) else None


def _starts(program: str) -> bool:
    try:
        return subprocess.run([program, "--version"], capture_output=True, timeout=60).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


def install() -> str:
    """Have apt install both; what went wrong, or nothing."""
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        return "no chromium and chromedriver, and only root with apt-get can install them here"
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    apt = ["apt-get", "-qq", "-o", "DPkg::Lock::Timeout=120", "-o", "Acquire::Retries=2"]
    get = [*apt, "install", "-y", "--no-install-recommends"]

    def run(*command: str, timeout: float | None) -> str:
        try:
            done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout)
        except subprocess.TimeoutExpired:
            return f"`{' '.join(command)}` took longer than {timeout:g} s"
        return "" if done.returncode == 0 else f"`{' '.join(command)}`: {done.stderr.strip()[-500:]}"

    # Only the download has a limit: dpkg must not be ended in the middle.
    download = [*get, "--download-only", *PACKAGES]
    if run(*download, timeout=INSTALL_S):  # the lists of packages may be absent, or old
        problem = run(*apt, "update", timeout=INSTALL_S) or run(*download, timeout=INSTALL_S)
        if problem:
            return problem
    return run(*get, *PACKAGES, timeout=None)


@pytest.fixture(scope="session")
def programs() -> Programs:
    """Chromium and its driver, installed if they are not there and may be."""
    try:
        with FileLock(Path(tempfile.gettempdir()) / "baton-tests-chromium.lock", timeout=LOCK_S):
            found = find_programs()
            problem = "" if found else install()
            found = found or find_programs()
    except Timeout:
        found, problem = None, f"another process has been installing chromium for {LOCK_S:g} s"
    if found is None:
        pytest.skip(problem or "chromium or chromedriver does not start")
    return found


@pytest.fixture(scope="session")
def driver(programs: Programs, tmp_path_factory: pytest.TempPathFactory) -> Iterator[webdriver.Chrome]:
    options = webdriver.ChromeOptions()
    options.binary_location = programs.browser
    profile = tmp_path_factory.mktemp("chromium")
    for argument in (
        "--headless=new",
        "--no-sandbox",
        "--disable-dev-shm-usage",
        "--disable-gpu",
        "--no-first-run",
        "--disable-background-networking",
        "--disable-component-update",
        f"--user-data-dir={profile}",
    ):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(programs.driver))
    try:
        driver.set_script_timeout(20)
        yield driver
    finally:
        driver.quit()


class Browser:
    """What the tests do with a page. `expected`: parts of messages on the console that are no failure."""

    def __init__(self, driver: webdriver.Chrome):
        self.driver = driver
        self.expected = ["net::ERR_"]  # the router has ended before the page

    def open(self, url: str, *, width: int = 1280, height: int = 900, dark: bool = False) -> None:
        self.resize(width, height)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})
        self.driver.get(url)

    def resize(self, width: int, height: int = 900) -> None:
        """A real window has a least width, what is emulated has none."""
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)

    def find(self, selector: str) -> WebElement:
        return self.driver.find_element(By.CSS_SELECTOR, selector)

    def all(self, selector: str) -> list[WebElement]:
        return self.driver.find_elements(By.CSS_SELECTOR, selector)

    def text(self, selector: str) -> str:
        """As it is in the document, seen or not; empty if there is no such element."""
        return str(self.script("return document.querySelector(arguments[0])?.textContent ?? ''", selector))

    def script(self, code: str, *arguments: Any) -> Any:
        return self.driver.execute_script(code, *arguments)

    def wait(self, condition: Callable[[], Any], what: str) -> None:
        """As `wait_until`; an element that is not there yet, or not any more, means no."""

        def holds() -> bool:
            try:
                return bool(condition())
            except (NoSuchElementException, StaleElementReferenceException):
                return False

        wait_until(holds, what)

    def wait_text(self, selector: str, part: str) -> None:
        self.wait(lambda: part in self.text(selector), f"{part!r} in {selector}; it is {self.text(selector)!r}")

    def focused(self) -> str:
        """The id of what has the focus, or its classes."""
        return str(self.script("const e = document.activeElement; return e.id || e.className || e.tagName"))

    def console(self) -> list[str]:
        """Complaints since the last call that are not expected: errors, refusals by the page's policy, warnings."""
        entries = [entry["message"] for entry in self.driver.get_log("browser") if entry["level"] != "INFO"]
        return [entry for entry in entries if not any(part in entry for part in self.expected)]


@pytest.fixture
def browser(driver: webdriver.Chrome) -> Iterator[Browser]:
    """Fails the test whose page complains on the console."""
    browser = Browser(driver)
    driver.get("about:blank")  # whatever polled before stops
    driver.get_log("browser")
    yield browser
    complaints = browser.console()
    driver.get("about:blank")
    assert complaints == []
