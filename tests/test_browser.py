"""The built book in a real browser: every page whole, offline, readable on a phone and without seeing its pictures.

Skipped where there is no Chromium with its driver, or no built book (`make book` builds it into _build/html).
"""

import json
import shutil
from pathlib import Path
from urllib.parse import unquote, urldefrag, urlparse

import pytest

HTML = Path(__file__).resolve().parent.parent / "_build" / "html"
PAGES = sorted(
    p for p in HTML.rglob("*.html") if not {"_static", "_sphinx_design_static"} & set(p.relative_to(HTML).parts)
)  # fmt: skip
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome") or shutil.which("chromium-browser")
DRIVER = shutil.which("chromedriver")

pytestmark = [
    pytest.mark.skipif(not PAGES, reason="no built book: run `make book` first"),
    pytest.mark.skipif(not (CHROMIUM and DRIVER), reason="no Chromium with its driver on this machine"),
]


@pytest.fixture(scope="module")
def browser():
    selenium = pytest.importorskip("selenium.webdriver", reason="selenium is not installed (extra 'dev')")
    options = selenium.ChromeOptions()
    options.binary_location = CHROMIUM
    for flag in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = selenium.Chrome(options=options, service=selenium.ChromeService(DRIVER))
    driver.set_script_timeout(60)
    yield driver
    driver.quit()


def sized(browser, width: int) -> None:
    """A page `width` CSS pixels wide: narrower than any window may be."""
    metrics = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)


def opened(browser, page: Path) -> None:
    browser.get(page.as_uri())
    browser.execute_async_script(
        "const done = arguments[0]; const ready = window.MathJax && MathJax.startup && MathJax.startup.promise;"
        "Promise.resolve(ready).then(() => setTimeout(done, 100));"
    )


def ids(path: Path, cache: dict = {}) -> set[str]:  # noqa: B006  one reading of a file for all tests
    import re

    if path not in cache:
        cache[path] = set(re.findall(r'\b(?:id|name)="([^"]+)"', path.read_text(encoding="utf-8")))
    return cache[path]


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.relative_to(HTML).as_posix())
def test_a_page_is_whole(browser, page):
    """No error in the console, nothing asked of the network, no missing image, file or anchor, formulas set."""
    browser.get_log("browser"), browser.get_log("performance")  # empties them
    sized(browser, 1280)
    opened(browser, page)
    # a page that is opened as a file may not read another: the search index is the one thing that tries
    errors = [e["message"] for e in browser.get_log("browser") if e["level"] == "SEVERE"]
    assert not errors, errors
    asked = [json.loads(e["message"])["message"] for e in browser.get_log("performance")]
    urls = {m["params"]["request"]["url"] for m in asked if m["method"] == "Network.requestWillBeSent"}
    assert not [u for u in urls if not u.startswith(("file:", "data:", "blob:"))]

    images = browser.execute_script(
        "return [...document.images].map(i => [i.src.slice(0, 100), i.complete && i.naturalWidth > 0, i.alt])"
    )
    assert not [src for src, there, _ in images if not there], "missing images"
    assert not [src for src, _, alt in images if not alt.strip() and not src.endswith(("logo.png", "logo.svg"))], (
        "no alt"
    )
    links = browser.execute_script("return [...document.links].map(a => a.href)")
    broken = []
    for link in set(links):
        url, anchor = urldefrag(link)
        if urlparse(url).scheme == "file":
            target = Path(unquote(urlparse(url).path))
            if not target.exists() or (anchor and target.suffix == ".html" and unquote(anchor) not in ids(target)):
                broken.append(link)
    assert not broken, broken
    unset = browser.execute_script(
        "return [...document.querySelectorAll('.math')].filter(m => !m.querySelector('mjx-container')).length"
    )
    assert unset == 0, f"{unset} formulas were not set"


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.relative_to(HTML).as_posix())
def test_a_page_fits_a_phone(browser, page):
    sized(browser, 400)
    opened(browser, page)
    wide = browser.execute_script("return document.documentElement.scrollWidth - document.documentElement.clientWidth")
    culprits = browser.execute_script(
        "return [...document.querySelectorAll('main *')].filter(e => e.getBoundingClientRect().right > innerWidth + 1"
        " && !e.closest('table, pre, .cell_output, [style*=overflow]')).slice(0, 3).map(e => e.outerHTML.slice(0, 150))"
    )
    assert wide <= 0, culprits
