# SPDX-License-Identifier: Apache-2.0
"""A headless browser for tests of pages, cut off from every network but what `reaches` names.

It also has the questions that can be asked of all pages.
"""

import os
import shutil

import pytest

webdriver = pytest.importorskip("selenium.webdriver")
from selenium.webdriver.chrome.options import Options  # noqa: E402
from selenium.webdriver.chrome.service import Service  # noqa: E402
from selenium.webdriver.support.ui import WebDriverWait  # noqa: E402

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
needs_browser = pytest.mark.skipif(not (CHROMIUM and DRIVER), reason="chromium and chromium-driver are not installed")


def start_browser(reaches=""):
    options = Options()
    options.binary_location = CHROMIUM
    for argument in ("--headless=new", "--disable-gpu", "--disable-dev-shm-usage", "--window-size=1280,1000"):
        options.add_argument(argument)
    options.add_argument("--host-resolver-rules=MAP * ~NOTFOUND" + (f", EXCLUDE {reaches}" if reaches else ""))
    if os.geteuid() == 0:
        options.add_argument("--no-sandbox")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(service=Service(DRIVER), options=options)
    driver.set_page_load_timeout(60)
    driver.set_script_timeout(60)
    return driver


class BrowserPage:
    def __init__(self, browser):
        self.browser = browser
        self.emulate("light")
        self.width(1280)
        browser.get_log("browser"), browser.get_log("performance")

    def emulate(self, scheme, media=""):
        self.browser.execute_cdp_cmd(
            "Emulation.setEmulatedMedia",
            {"media": media, "features": [{"name": "prefers-color-scheme", "value": scheme}]},
        )

    def width(self, pixels):
        self.browser.execute_cdp_cmd(
            "Emulation.setDeviceMetricsOverride",
            {"width": pixels, "height": 900, "deviceScaleFactor": 1, "mobile": False},
        )

    def run(self, script, *arguments):
        return self.browser.execute_script(script, *arguments)

    def wait(self, script):
        WebDriverWait(self.browser, 20, 0.1).until(lambda _: self.run(script))

    def text(self, selector):
        return self.run("return document.querySelector(arguments[0]).textContent", selector)
