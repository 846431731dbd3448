"""The HTML report in headless Chromium: what it shows on a desktop, on a phone, in the dark and in print.

Needs Chromium, its driver and selenium (Debian: chromium, chromium-driver; pip: selenium); skipped without them.
"""

import base64
import json
import os
import shutil

import pytest
from reports import matrices, record

from fwanda_pruner.report.html import write_html

webdriver = pytest.importorskip("selenium.webdriver")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
DRIVER = shutil.which("chromedriver")
pytestmark = pytest.mark.skipif(not (CHROMIUM and DRIVER), reason="no chromium and chromedriver here")

LONG = "a-folder-with-a-name-that-is-too-long-for-one-line-of-a-phone/" * 4


@pytest.fixture(scope="module")
def browser():
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for flag in ("--headless=new", "--disable-gpu", *(["--no-sandbox"] if os.geteuid() == 0 else [])):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    service = webdriver.chrome.service.Service(DRIVER)
    driver = webdriver.Chrome(options=options, service=service)
    yield driver
    driver.quit()


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """Addresses of a page about one run, and of a page about three."""
    folder = tmp_path_factory.mktemp("pages")
    other = record(config=record().config | {"model": LONG, "method": "wanda", "chosen": None})
    write_html({LONG: record(matrices=matrices(32))}, folder / "one.html")
    write_html({"first": record(), LONG: other, "third": record()}, folder / "three.html")
    return {name: (folder / f"{name}.html").as_uri() for name in ("one", "three")}


def show(browser, address: str, width: int = 1200, *, scheme: str = "light", media: str = "screen") -> None:
    """Opens a page in a window of that width."""
    command = browser.execute_cdp_cmd
    size = {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": width < 500}
    command("Emulation.setDeviceMetricsOverride", size)
    features = [{"name": "prefers-color-scheme", "value": scheme}]
    command("Emulation.setEmulatedMedia", {"media": media, "features": features})
    browser.get(address)


def style(browser, selector: str, name: str) -> str:
    script = "return getComputedStyle(document.querySelector(arguments[0]))[arguments[1]]"
    return browser.execute_script(script, selector, name)


def brightness(colour: str) -> float:
    """Mean of red, green and blue of `rgb(...)`."""
    return sum(float(part) for part in colour.split("(")[1].rstrip(")").split(",")[:3]) / 3


@pytest.mark.parametrize("name", ["one", "three"])
def test_the_page_shows_its_numbers_asks_for_nothing_and_has_no_errors(browser, pages, name):
    browser.get_log("performance"), browser.get_log("browser")
    show(browser, pages[name])
    text = browser.find_element("tag name", "body").text
    assert "F-Wanda (auto) set" in text
    for expected in ("1.50", "+0.250", "choose the allocation", "20.5", "round 2", "nsamples is small"):
        assert expected in text
    events = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    asked = [e["params"]["request"]["url"] for e in events if e["method"] == "Network.requestWillBeSent"]
    assert [url for url in asked if not url.startswith("data:")] == [pages[name]]
    assert browser.get_log("browser") == []


@pytest.mark.parametrize("name", ["one", "three"])
@pytest.mark.parametrize("width", [320, 390, 768, 1200])
def test_nothing_is_wider_than_the_window(browser, pages, name, width):
    show(browser, pages[name], width)
    assert browser.execute_script("return document.documentElement.scrollWidth") <= width
    outside = """return [...document.querySelectorAll("h1, h2, h3, p, li, dd, figure, svg, summary")]
        .filter(e => !e.closest(".scroll") && e.getBoundingClientRect().width
            && e.getBoundingClientRect().right > arguments[0] + 1).map(e => e.outerHTML.slice(0, 80))"""
    assert browser.execute_script(outside, width) == []


@pytest.mark.parametrize("name", ["one", "three"])
@pytest.mark.parametrize("width", [375, 390])
def test_a_phone_shows_whole_tables_of_quality_and_whole_names_of_matrices(browser, pages, name, width):
    show(browser, pages[name], width)
    cut = """return [...document.querySelectorAll("[aria-labelledby=quality] .scroll, .heat th")]
        .filter(e => e.clientWidth && e.scrollWidth > e.clientWidth + 1).map(e => e.outerHTML.slice(0, 80))"""
    assert browser.execute_script(cut) == []
    broken = """return [...document.querySelectorAll(".heat thead th")].filter(e => {
        const range = document.createRange(); range.selectNodeContents(e); return range.getClientRects().length > 1})"""
    assert browser.execute_script(broken) == []
    assert "The bar is the increase" not in browser.find_element("css selector", "[aria-labelledby=quality]").text


def test_text_in_pictures_stays_legible_on_a_phone(browser, pages):
    show(browser, pages["one"], 390)
    script = """return [...document.querySelectorAll("svg text")].map(e => e.getBoundingClientRect().height)
        .filter(height => height > 0)"""
    heights = browser.execute_script(script)
    assert len(heights) > 20 and min(heights) >= 9


def test_dark_mode_darkens_the_page_and_its_pictures(browser, pages):
    colours = {}
    for scheme in ("light", "dark"):
        show(browser, pages["one"], scheme=scheme)
        parts = {"page": ("body", "backgroundColor"), "ink": ("body", "color"), "chart": ("svg text", "fill")}
        colours[scheme] = {name: brightness(style(browser, *part)) for name, part in parts.items()}
    light, dark = colours["light"], colours["dark"]
    assert light["page"] > 230 and dark["page"] < 40
    assert all(light[part] < 80 and dark[part] > 200 for part in ("ink", "chart"))


def test_print_is_dark_on_white_whatever_the_scheme(browser, pages):
    show(browser, pages["three"], scheme="dark", media="print")
    assert brightness(style(browser, "body", "color")) < 80 and brightness(style(browser, "svg text", "fill")) < 80
    assert style(browser, "body", "backgroundColor") == "rgb(255, 255, 255)"
    assert style(browser, "nav", "display") == "none"
    pdf = base64.b64decode(browser.execute_cdp_cmd("Page.printToPDF", {"printBackground": False})["data"])
    assert pdf.startswith(b"%PDF") and 1 <= pdf.count(b"/Type /Page\n") <= 12


def test_the_keyboard_reaches_links_tables_and_details(browser, pages):
    show(browser, pages["one"], 390)
    keys, seen = webdriver.common.keys.Keys, []
    for _ in range(60):
        browser.switch_to.active_element.send_keys(keys.TAB)
        focused = browser.switch_to.active_element
        seen.append((focused.tag_name, focused.get_attribute("class") or focused.get_attribute("href") or ""))
        if focused.tag_name == "summary" and "table" in focused.text:
            focused.send_keys(keys.ENTER)
            break
    assert seen[0] == ("a", "skip") and ("div", "scroll") in seen and any("#sparsity" in place for _, place in seen)
    assert "global b=1 c=0.5" in browser.find_element("css selector", "#search ~ .grid details").text
    assert browser.find_element("css selector", "#search ~ .grid details").get_attribute("open")


def test_fields_of_the_heat_map_contrast_with_their_numbers(browser, pages):
    show(browser, pages["one"])
    script = """return [...document.querySelectorAll(".heat td[class]")].map(e => {
        const s = getComputedStyle(e); return [s.backgroundColor, s.color]})"""
    fields = browser.execute_script(script)
    assert len(fields) == 32 * 5 * 2
    assert min(contrast(*field) for field in {tuple(field) for field in fields}) >= 4.5


def contrast(one: str, other: str) -> float:
    """Contrast ratio of two colours, as WCAG defines it."""
    light, dark = sorted((luminance(one), luminance(other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def luminance(colour: str) -> float:
    parts = [float(part) / 255 for part in colour.split("(")[1].rstrip(")").split(",")[:3]]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
