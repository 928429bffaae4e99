"""The page in Chromium, with real providers: what only a browser can show."""

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from symbiosis_priv.harness.local import LocalFederation
from tenant import RemoteConfig
from tenant.endpoint.options import Serving
from tenant.model.ledger import ledger_of
from tests.tenant.endpoint.conftest import served_at

INSTALL = "to test the page, install Chromium and `pip install playwright`"
playwright: Any = pytest.importorskip("playwright.sync_api", reason=INSTALL)
KEY, COMPLETIONS = "sk-test", "**/v1/chat/completions"
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant: "
Served = tuple[Any, str, LocalFederation]


@pytest.fixture(scope="module")
def served(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    place = tmp_path_factory.mktemp("page")
    model = Path(shutil.copytree(checkpoint, place / "model"))
    (model / "chat_template.jinja").write_text(TEMPLATE)
    with LocalFederation(model, place) as local:
        remote = RemoteConfig(federation=local.federation, cache=place / "cache")  # prepared with this template
        with served_at(model, remote, key=KEY, options=Serving(drain_s=1.0)) as (service, address):
            yield service.model, address, local


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    if (path := shutil.which("chromium") or shutil.which("google-chrome")) is None:
        pytest.skip(INSTALL)
    with playwright.sync_playwright() as driver:
        yield driver.chromium.launch(executable_path=path, chromium_sandbox=False)


@pytest.fixture
def page(browser: Any, served: Served, request: pytest.FixtureRequest) -> Iterator[Any]:
    """The page, signed in. Afterwards: it has asked no other server, and its scripts had no errors."""
    page = browser.new_page(color_scheme=getattr(request, "param", "light"))
    page.add_init_script(f"sessionStorage.getItem('key') ?? sessionStorage.setItem('key', '{KEY}')")
    page.add_init_script("localStorage.tokens ??= 8; localStorage.temperature = 0")
    hosts, errors = set[str](), list[str]()
    page.on("request", lambda request: hosts.add(request.url.split("/")[2]))
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.goto(served[1])
    page.get_by_role("option").first.wait_for(state="attached")
    yield page
    assert (hosts, errors) == ({served[1].split("/")[2]}, [])
    page.close()


def press(page: Any, name: str) -> None:
    page.get_by_role("button", name=name, exact=True).last.click()


def answer_of(page: Any) -> str:
    """Wait for the answer in progress and return its text, before Markdown."""
    page.locator("#chat [aria-busy]").wait_for(state="detached")
    return str(page.locator("#chat .assistant").last.get_attribute("data-text"))


def send(page: Any, message: str) -> None:
    page.get_by_label("Message").fill(message)
    page.keyboard.press("Enter")


def ask(page: Any, message: str) -> str:
    send(page, message)
    page.wait_for_function("() => !message.value")  # sent: a quick answer may have ended already
    return answer_of(page)


def answers_with(page: Any, text: str, *, error: str = "") -> None:
    """Let the endpoint answer the next questions with this text, and then fail if there is an `error`."""
    chunks: list[Any] = [{"choices": [{"delta": {"content": part}}]} for part in re.findall(r"(?s).{1,7}", text)]
    chunks += [{"error": {"message": error}}] if error else []
    body = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + "data: [DONE]\n\n"
    page.route(COMPLETIONS, lambda route: route.fulfill(body=body, content_type="text/event-stream"))


def test_the_ledger_counts_what_the_session_counts(page: Any, served: Served) -> None:
    before: Any = ledger_of(served[0])
    ask(page, "The weather")
    after: Any = ledger_of(served[0])
    assert page.locator("#costs [data-figure=rows]").text_content() == f"{after.rows - before.rows:,}" != "0"
    for one, then in zip(after.providers, before.providers, strict=True):
        found = page.locator(f"[data-provider={one.name}] [data-figure=verified]").text_content()
        assert found == f"{one.verified - then.verified:,}" != "0"
    saw, hides = (page.locator(f"#{name}").get_attribute("aria-label") for name in ("saw", "hides"))
    assert len(saw) > len(hides)  # the row's numbers are smaller than those that the executor saw


def test_a_question_that_gets_no_answer_is_sent_once(page: Any) -> None:
    page.route(COMPLETIONS, lambda route: None)
    send(page, "The weather")
    press(page, "Stop")
    page.get_by_text("Stopped.").wait_for()
    assert page.get_by_label("Message").input_value() == "The weather"
    assert page.locator("#chat article").count() == 0
    answers_with(page, "It is cloudy", error="no answer within 120 s")
    assert ask(page, "The <b>weather</b>") == "It is cloudy"
    assert "within 120 s" in page.locator("#chat").get_by_role("alert").inner_text()
    page.unroute(COMPLETIONS)
    with page.expect_request(COMPLETIONS) as asked:
        press(page, "Try again")
    assert asked.value.post_data_json["messages"] == [{"role": "user", "content": "The <b>weather</b>"}]
    answer_of(page)
    assert page.locator("#chat article").count() == 2


def test_the_status_says_which_provider_is_waited_for(page: Any, served: Served) -> None:
    page.evaluate("localStorage.tokens = 400")
    page.reload()
    send(page, "The weather")
    page.locator("#chat .assistant .text:not(:empty)").wait_for()
    served[2].kill("executor")
    page.get_by_text("Waiting for executor").wait_for()
    said = page.locator("#status").inner_text()
    assert re.fullmatch(r"Waiting for executor, .+ since [\d:]{8}, gives up at [\d:]{8}\.", said), said
    served[2].restart("executor")
    page.locator("#status").filter(has_text="Answering").wait_for()
    press(page, "Stop")
    page.get_by_text("Stopped.").wait_for()


def test_markdown_is_shown_and_never_html(page: Any) -> None:
    """markdown.html is what the page makes of markdown.txt. Each paragraph has the direction of its own language."""
    here = Path(__file__)
    text, expected = (here.with_name(f"markdown.{kind}").read_text(encoding="utf-8") for kind in ("txt", "html"))
    answers_with(page, text)
    assert ask(page, "كيف الطقس اليوم؟") == text
    shown = page.locator("#chat .assistant .text").last
    assert shown.inner_html().replace(' class=""', "").replace("><", ">\n<") == expected.strip()
    right = page.locator("#chat .user .text > div, #chats li button:first-child").all()
    assert {one.evaluate("(element) => getComputedStyle(element).direction") for one in right} == {"rtl"}


def test_a_question_is_edited_in_place_and_chats_are_kept_until_they_are_deleted(page: Any) -> None:
    ask(page, "The weather")
    for end, kept in (("Cancel", "The weather"), ("Send", "The tide")):
        press(page, "Edit")
        page.get_by_label("Edited message").fill("The tide")
        page.locator("#chat").get_by_role("button", name=end).click()
        answer_of(page)
        page.reload()
        assert page.locator("#chat .user .text").inner_text() == kept
        assert page.locator("#chat article").count() == 2
    for action, left in (("dismiss", 2), ("accept", 0)):
        page.once("dialog", lambda dialog, action=action: getattr(dialog, action)())
        press(page, "Delete the chat The tide")
        assert page.locator("#chat article").count() == left


def contrasts(page: Any) -> dict[tuple[str, str], float]:
    """The contrast of every button that can be used now: at rest, focused, under the pointer, and pressed."""
    found = {}
    measure = Path(__file__).with_name("contrast.js").read_text(encoding="utf-8")
    for button in page.locator("dialog[open] button:visible, body:not(:has(dialog[open])) button:visible").all():
        name = button.inner_text() or button.get_attribute("aria-label")
        page.mouse.move(0, 0)
        for act in (lambda: None, button.focus, button.hover, page.mouse.down):
            act()
            found[name, act.__name__] = button.evaluate(measure)
        page.mouse.move(0, 0)
        page.mouse.up()  # not on the button: that would press it
    page.evaluate("getSelection().removeAllRanges()")
    return found


@pytest.mark.parametrize("page", ["light", "dark"], indirect=True)
def test_the_text_of_buttons_has_contrast_in_every_state(page: Any) -> None:
    found = contrasts(page)  # with examples
    page.evaluate("sessionStorage.setItem('key', 'wrong')")
    page.reload()
    page.get_by_role("dialog").get_by_role("alert").filter(has_text="does not accept this key").wait_for()
    found |= contrasts(page)
    page.get_by_label("API key").fill(KEY)
    press(page, "Continue")
    answers_with(page, "Some code:\n```\nls\n```\n")
    ask(page, "The weather")
    found |= contrasts(page)
    press(page, "Edit")
    found |= contrasts(page)
    press(page, "Settings")
    found |= contrasts(page)
    press(page, "Close")
    page.locator("#chat").get_by_role("button", name="Cancel").click()
    page.route(COMPLETIONS, lambda route: None)
    press(page, "Regenerate")
    found |= contrasts(page)  # with Stop
    assert {name for name, _ in found} >= {"Continue", "Close", "Send", "Stop", "Cancel", "Edit", "Copy", "New chat"}
    assert {one: contrast for one, contrast in found.items() if contrast < 4.5} == {}


def test_a_phone_shows_the_conversation_first(page: Any) -> None:
    page.set_viewport_size({"width": 390, "height": 844})
    ask(page, "The weather")
    assert page.locator("#chat").bounding_box()["height"] > 844 * 0.5
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    assert not page.locator("#subject").is_visible()
    page.get_by_text("Privacy ledger").click()
    assert page.locator("#subject").is_visible()
    page.get_by_text("Chats", exact=True).click()
    page.locator("#subject").wait_for(state="hidden")
    for height in (844, 420):  # with a keyboard
        page.set_viewport_size({"width": 390, "height": height})
        for name in ("message", "send"):
            place = page.locator(f"#{name}").bounding_box()
            at = [place["x"] + place["width"] / 2, place["y"] + place["height"] / 2]
            assert page.evaluate("(at) => document.elementFromPoint(...at).id", at) == name
