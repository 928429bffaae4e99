"""The page in Chromium, with real providers: answers, adapters, and a ledger that counts what the session counts."""

import json
import re
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI

from symbiosis_priv.harness.local import LocalFederation
from tenant import RemoteConfig
from tenant.endpoint.options import Serving
from tenant.model.ledger import ledger_of
from tenant.session.tally import Ledger
from tests.tenant.endpoint.conftest import served_at

INSTALL = "to test the page, install Chromium and `pip install playwright`"
playwright: Any = pytest.importorskip("playwright.sync_api", reason=INSTALL)
KEY = "sk-test"
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant: "


@dataclass(frozen=True)
class Served:
    model: Any
    url: str
    local: LocalFederation

    def ledger(self) -> Ledger:
        ledger = ledger_of(self.model)
        assert ledger is not None
        return ledger

    def answer(self, model: str, message: str) -> str | None:
        messages: Any = [{"role": "user", "content": message}]
        with OpenAI(base_url=self.url + "/v1", api_key=KEY, max_retries=0) as client:
            answer = client.chat.completions.create(model=model, messages=messages, temperature=0, max_tokens=8)
        return answer.choices[0].message.content


@pytest.fixture(scope="module")
def served(checkpoint: Path, adapters: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    place = tmp_path_factory.mktemp("page")
    model = Path(shutil.copytree(checkpoint, place / "model"))
    (model / "chat_template.jinja").write_text(TEMPLATE)
    with LocalFederation(model, place) as local:
        remote = RemoteConfig(federation=local.federation, cache=place / "cache")  # prepared with this template
        options, chosen = Serving(drain_s=1.0), {"lora": adapters / "lora"}
        with served_at(model, remote, key=KEY, adapters=chosen, options=options) as (service, address):
            yield Served(service.model, address, local)


@contextmanager
def chromium() -> Iterator[Any]:
    path = shutil.which("chromium") or shutil.which("google-chrome")
    if path is None:
        pytest.skip(INSTALL)
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=path, chromium_sandbox=False)
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as browser:
        yield browser


@pytest.fixture
def page(browser: Any, served: Served) -> Iterator[Any]:
    """The page, signed in by its address."""
    with signed_in(browser, served.url) as page:
        page.get_by_role("option", name="lora").wait_for(state="attached")
        settings(page, tokens="8", temperature="0")
        yield page


@contextmanager
def signed_in(browser: Any, url: str, *, key: str = KEY, **look: Any) -> Iterator[Any]:
    """The page of an endpoint. Afterwards: it has asked no other server, and its scripts had no errors."""
    page = browser.new_page(**look)
    page.set_default_timeout(60_000)
    hosts: set[str] = set()
    errors: list[str] = []
    page.on("request", lambda request: hosts.add(request.url.split("/")[2]))
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.goto(f"{url}/#key={key}")
    page.get_by_role("button", name="Continue").click()
    page.get_by_role("option").first.wait_for(state="attached")
    assert page.url == url + "/"
    yield page
    assert hosts == {url.split("/")[2]}
    assert errors == []
    page.close()


def settings(page: Any, **values: str) -> None:
    """Change settings in their dialog."""
    page.get_by_role("button", name="Settings").click()
    for name, value in values.items():
        page.locator(f"#{name}").fill(value)
    page.get_by_role("button", name="Close").click()


def answer_of(page: Any) -> str:
    """Wait for the answer in progress and return its text, before Markdown."""
    page.locator("#chat [aria-busy]").wait_for(state="detached")
    return str(page.locator("#chat .assistant").last.get_attribute("data-text"))


def ask(page: Any, message: str) -> str:
    """Send a message and return the answer."""
    page.get_by_label("Message").fill(message)
    page.keyboard.press("Enter")
    page.wait_for_function("() => !message.value")  # sent: a quick answer may have ended already
    return answer_of(page)


COMPLETIONS = "**/v1/chat/completions"


def answers_with(page: Any, text: str, *, error: str = "") -> None:
    """Let the endpoint answer the next questions with this text, and then fail if there is an `error`."""
    chunks: list[Any] = [{"choices": [{"delta": {"content": part}}]} for part in re.findall(r"(?s).{1,7}", text)]
    chunks += [{"error": {"message": error}}] if error else []
    body = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + "data: [DONE]\n\n"
    page.route(COMPLETIONS, lambda route: route.fulfill(body=body, content_type="text/event-stream"))


def loses(page: Any, press: str) -> None:
    """Let the answer that a button asks for fail half-way."""
    answers_with(page, "It is", error="lost")
    page.get_by_role("button", name=press).click()
    page.get_by_role("alert").filter(has_text="lost").wait_for()
    page.unroute(COMPLETIONS)


def question(request: Any) -> Any:
    """The messages of a request."""
    return request.value.post_data_json["messages"]


def style(place: Any, name: str) -> str:
    """A computed property of an element."""
    return str(place.evaluate("(element, name) => getComputedStyle(element)[name]", name))


def figure(page: Any, place: str, name: str) -> int:
    return int(str(page.locator(f"{place} [data-figure={name}]").text_content()).replace(",", ""))


def test_answers_are_those_of_the_api_and_the_ledger_that_of_the_session(page: Any, served: Served) -> None:
    before = served.ledger()
    found = ask(page, "The weather")
    after = served.ledger()
    assert figure(page, "#costs", "rows") == after.rows - before.rows > 0
    assert figure(page, "#costs", "answers_verified") == after.answers_verified - before.answers_verified
    assert figure(page, "#costs", "answers_rejected") == 0
    for one, then in zip(after.providers, before.providers, strict=True):
        assert figure(page, f"[data-provider={one.name}]", "verified") == one.verified - then.verified > 0
        assert one.operator in page.locator(f"[data-provider={one.name}]").text_content()
    said = page.locator("#subject").inner_text()
    assert (
        f"the executor saw {after.rows - before.rows:,} rows of integers that it cannot tell from random ones" in said
    )
    assert "The helper saw a random seed. Nothing else left this machine." in said
    page.get_by_text("Details").click()
    assert page.locator("#costs .quiet").first.inner_text().endswith("per token")
    assert found == served.answer("tiny", "The weather")
    page.get_by_label("Model").select_option("lora")
    page.get_by_role("button", name="New chat").click()
    assert ask(page, "The weather") == served.answer("lora", "The weather") != found


def test_a_row_is_drawn_as_it_is_and_as_the_executor_saw_it(page: Any) -> None:
    texts = list[str]()

    def note(route: Any) -> None:
        answer = route.fetch()
        texts.append(answer.text())
        route.fulfill(response=answer)

    page.route(COMPLETIONS, note)
    ask(page, "The weather")
    [row] = [json.loads(found)["usage"]["row"] for found in re.findall(r"data: (.*\"usage\": ?{.*)", texts[0])]
    assert max(map(abs, row["hidden"])) < 1 << 29 < max(map(abs, row["saw"]))
    for name, integers in (("saw", row["saw"]), ("hides", row["hidden"])):
        strip = page.locator(f"#{name}")
        range_ = f"{len(integers)} integers between {min(integers):,} and {max(integers):,}"
        assert strip.get_attribute("aria-label") == range_ == strip.locator("+ p").inner_text()
        read = "(strip) => [...strip.getContext('2d').getImageData(0, 0, strip.width, strip.height).data]"
        pixels = strip.evaluate(read)[: 4 * len(integers)]
        assert set(pixels[3::4]) == {255}
        if name == "saw":
            most = max(map(abs, integers))
            assert all(abs(128 + 127 * n / most - grey) <= 1 for n, grey in zip(integers, pixels[::4], strict=True))
        else:
            assert {
                n > 0 for n, red, blue in zip(integers, pixels[::4], pixels[2::4], strict=True) if red > blue + 9
            } == {True}
    page.get_by_role("button", name="New chat").click()
    assert page.locator("#row").is_hidden()


def test_an_answer_can_be_stopped_and_an_error_is_shown(page: Any) -> None:
    settings(page, tokens="400")
    page.get_by_label("Message").fill("The <b>weather</b>")
    page.get_by_role("button", name="Send").click()
    page.locator("#chat .assistant .text:not(:empty)").wait_for()
    page.get_by_role("button", name="Stop").click()
    page.get_by_text("Stopped.").wait_for()
    assert page.locator("#chat .user .text").first.inner_text() == "The <b>weather</b>"
    settings(page, tokens="99999999")
    ask(page, "The weather")
    assert "tokens" in page.locator("#chat").get_by_role("alert").inner_text()
    assert page.locator("#status").inner_text() == "No answer."
    assert page.get_by_label("Message").input_value() == ""


def test_a_question_that_is_stopped_before_its_answer_is_given_back(page: Any) -> None:
    page.route(COMPLETIONS, lambda route: None)
    for draft, kept in (("", 0), ("And the sea?", 1)):
        page.get_by_label("Message").fill("The weather")
        page.keyboard.press("Enter")
        page.get_by_label("Message").fill(draft)
        page.get_by_role("button", name="Stop").click()
        page.get_by_text("Stopped.").wait_for()
        assert page.get_by_label("Message").input_value() == (draft or "The weather")
        assert page.locator("#chat article").count() == page.locator("#chats li").count() == kept


def test_an_answer_that_failed_half_way_is_not_kept_and_its_question_is_sent_once(page: Any) -> None:
    answers_with(page, "It is cloudy", error="no answer from executor 'executor' within 120 s")
    assert ask(page, "The weather") == "It is cloudy"
    assert "within 120 s" in page.locator("#chat").get_by_role("alert").inner_text()
    assert "not complete" in page.locator("#status").inner_text()
    assert page.get_by_label("Message").input_value() == ""
    page.unroute(COMPLETIONS)
    for reload in (False, True):
        if reload:
            loses(page, "Regenerate")
            page.reload()
            assert page.locator("#chat article").count() == 1
        with page.expect_request(COMPLETIONS) as asked:
            page.get_by_role("button", name="Try again").click()
        assert question(asked) == [{"role": "user", "content": "The weather"}]
        answer_of(page)
        assert page.locator("#chat article").count() == 2
    loses(page, "Regenerate")
    with page.expect_request(COMPLETIONS) as asked:
        ask(page, "The sea")
    assert question(asked) == [{"role": "user", "content": "The sea"}]


def test_the_status_says_which_provider_is_waited_for(page: Any, served: Served) -> None:
    settings(page, tokens="400")
    page.get_by_label("Message").fill("The weather")
    page.keyboard.press("Enter")
    page.locator("#chat .assistant .text:not(:empty)").wait_for()
    served.local.kill("executor")
    page.get_by_text("Waiting for executor").wait_for()
    said = page.locator("#status").inner_text()
    found = re.fullmatch(r"Waiting for executor, .+ since ([\d:]{8}), gives up at ([\d:]{8})\.", said)
    assert found, said
    since, until = (sum(map(int.__mul__, (3600, 60, 1), map(int, one.split(":")))) for one in found.groups())
    assert 115 <= (until - since) % 86_400 <= 125
    assert page.locator("#status").get_attribute("aria-busy") is None
    served.local.restart("executor")
    page.locator("#status").filter(has_text="Answering").wait_for()
    page.get_by_role("button", name="Stop").click()
    page.get_by_text("Stopped.").wait_for()


def test_markdown_is_shown_and_never_html(page: Any) -> None:
    """markdown.html is what the page makes of markdown.txt. Each paragraph has the direction of its own language."""
    text, expected = (
        Path(__file__).with_name(f"markdown.{kind}").read_text(encoding="utf-8") for kind in ("txt", "html")
    )
    answers_with(page, text)
    assert ask(page, "كيف الطقس اليوم؟") == text
    shown = page.locator("#chat .assistant .text").last
    assert shown.inner_html().replace(' class=""', "").replace("><", ">\n<") == expected.strip()
    page.get_by_label("Message").fill("وغدا؟")
    right = page.locator("#message, #chat .user .text > div, #chats li button:first-child").all()
    assert {style(one, "direction") for one in right} == {"rtl"}
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    shown.get_by_role("button", name="Copy").last.click()
    shown.get_by_role("button", name="Copied").wait_for()
    assert page.evaluate("navigator.clipboard.readText()") == "print(1)  # واحد"


def test_chats_survive_a_reload_and_can_be_deleted(page: Any) -> None:
    first = ask(page, "The weather")
    page.get_by_role("button", name="New chat").click()
    ask(page, "The sea")
    page.reload()
    assert page.locator("#chat .user .text").inner_text() == "The sea"
    page.get_by_role("button", name="The weather", exact=True).click()
    page.reload()
    assert answer_of(page) == first
    for action, kept in (("dismiss", 2), ("accept", 0)):
        page.once("dialog", lambda dialog, action=action: getattr(dialog, action)())
        page.get_by_role("button", name="Delete the chat The weather").click()
        assert page.locator("#chat article").count() == kept
    assert page.locator("#chats li").count() == 1
    page.once("dialog", lambda dialog: dialog.accept())
    page.get_by_role("button", name="Delete all").click()
    assert page.evaluate("localStorage.getItem('chats')") is None


def test_an_answer_is_regenerated_and_a_question_edited(page: Any) -> None:
    first = ask(page, "The weather")
    page.get_by_label("Message").fill("And the sea?")
    page.keyboard.press("Enter")
    page.get_by_role("button", name="Edit").first.click()
    answer_of(page)
    assert page.get_by_label("Edited message").evaluate("(box) => box === document.activeElement")
    page.keyboard.press("Escape")
    with page.expect_request(COMPLETIONS) as asked:
        page.get_by_role("button", name="Regenerate").first.click()
    assert answer_of(page) == first  # temperature 0
    assert question(asked) == [{"role": "user", "content": "The weather"}]
    assert page.locator("#chat article").count() == 2
    for end in ("Cancel", "Escape", "Send"):
        page.get_by_role("button", name="Edit").click()
        box = page.get_by_label("Edited message")
        assert box.input_value() == "The weather"
        assert answer_of(page) == first
        box.fill("The tide")
        if end == "Escape":
            page.keyboard.press(end)
        elif end == "Cancel":
            page.locator("#chat").get_by_role("button", name=end).click()
        else:
            with page.expect_request(COMPLETIONS) as asked:
                page.locator("#chat").get_by_role("button", name=end).click()
            answer_of(page)
        assert box.count() == 0
    assert question(asked) == [{"role": "user", "content": "The tide"}]
    assert page.locator("#chat article").count() == 2


CONTRAST = Path(__file__).with_name("contrast.js").read_text(encoding="utf-8")


def contrasts(page: Any) -> dict[tuple[str, str], float]:
    """The contrast of every button that can be used now: at rest, focused, under the pointer, and pressed."""
    found = {}
    for button in page.locator("dialog[open] button:visible, body:not(:has(dialog[open])) button:visible").all():
        name = button.inner_text() or button.get_attribute("aria-label")
        page.mouse.move(0, 0)
        found[name, "rest"] = button.evaluate(CONTRAST)
        button.focus()
        found[name, "focus"] = button.evaluate(CONTRAST)
        button.hover()
        found[name, "hover"] = button.evaluate(CONTRAST)
        page.mouse.down()
        found[name, "pressed"] = button.evaluate(CONTRAST)
        page.mouse.move(0, 0)
        page.mouse.up()  # not on the button: that would press it
    page.evaluate("getSelection().removeAllRanges()")
    return found


@pytest.mark.parametrize("colours", ["light", "dark"])
def test_the_text_of_buttons_has_contrast_in_every_state(browser: Any, served: Served, colours: str) -> None:
    page = browser.new_page(color_scheme=colours)
    page.set_default_timeout(60_000)
    page.goto(served.url)
    page.get_by_role("button", name="Continue").wait_for()
    found = contrasts(page)
    page.get_by_label("API key").fill(KEY)
    page.get_by_role("button", name="Continue").click()
    page.get_by_role("option").first.wait_for(state="attached")
    found |= contrasts(page)  # with examples
    answers_with(page, "Some code:\n```\nls\n```\n")
    ask(page, "The weather")
    found |= contrasts(page)
    page.get_by_role("button", name="Edit").click()
    found |= contrasts(page)
    page.get_by_label("Edited message").focus()
    page.get_by_role("button", name="Settings").click()
    found |= contrasts(page)
    page.get_by_role("button", name="Close").hover()
    page.get_by_role("button", name="Close").click()
    page.route(COMPLETIONS, lambda route: None)
    page.get_by_role("button", name="Regenerate").click()
    found |= contrasts(page)  # with Stop
    names = {name for name, _ in found}
    assert names >= {"Continue", "Close", "Send", "Stop", "Cancel", "Edit", "Copy", "New chat", "Delete all"}
    assert {one: contrast for one, contrast in found.items() if contrast < 4.5} == {}
    page.close()


def test_a_phone_shows_the_conversation_first(page: Any) -> None:
    page.set_viewport_size({"width": 390, "height": 844})
    ask(page, "The weather")
    box = page.locator("#chat").bounding_box()
    assert box["height"] > 844 * 0.5
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    assert page.locator("header").bounding_box()["height"] < 70
    assert not page.locator("#subject").is_visible()
    page.get_by_text("Privacy ledger").click()
    assert page.locator("#subject").is_visible()
    page.get_by_text("Chats", exact=True).click()
    page.locator("#subject").wait_for(state="hidden")
    for height in (844, 420):  # with a keyboard
        page.set_viewport_size({"width": 390, "height": height})
        for name in ("message", "send"):
            place = page.locator(f"#{name}").bounding_box()
            assert 0 < place["y"] < place["y"] + place["height"] < height
            at = [place["x"] + place["width"] / 2, place["y"] + place["height"] / 2]
            assert page.evaluate("(at) => document.elementFromPoint(...at).id", at) == name
    page.set_viewport_size({"width": 390, "height": 844})
    page.emulate_media(reduced_motion="reduce")
    page.get_by_role("button", name="Settings").click()
    drawer = page.locator("#settings").bounding_box()
    assert (drawer["x"], drawer["width"], drawer["y"] + drawer["height"]) == (0, 390, 844)


def test_a_wrong_key_is_asked_for_again(browser: Any, served: Served) -> None:
    page = browser.new_page()
    page.goto(f"{served.url}/#key=wrong")
    page.get_by_text("from the link").wait_for()
    alert = page.get_by_role("dialog").get_by_role("alert")
    assert alert.inner_text() == ""
    assert page.evaluate("sessionStorage.getItem('key')") is None
    page.get_by_role("button", name="Continue").click()
    alert.filter(has_text="does not accept this key").wait_for()
    assert page.get_by_text("from the link").is_hidden()
    page.get_by_label("API key").fill(KEY)
    page.keyboard.press("Enter")
    page.get_by_role("option", name="tiny").wait_for(state="attached")
    page.close()


def take_pictures(address: str, folder: Path) -> None:
    """Take the pictures of docs/endpoint.md. `address`: the page of a running `make serve-demo`, as it was printed."""
    url, _, key = address.partition("/#key=")
    wide, phone = {"width": 1280, "height": 800}, {"width": 390, "height": 844}
    looks: dict[str, Any] = {
        "": {"viewport": wide},
        "-dark": {"viewport": wide, "color_scheme": "dark"},
        "-phone": {"viewport": phone, "is_mobile": True, "has_touch": True},
    }
    with chromium() as browser:
        for name, look in looks.items():
            with signed_in(browser, url, key=key, **look) as page:
                settings(page, tokens="160", temperature="0")
                ask(page, "Write a Python function that reverses a list, and explain it in one sentence.")
                if name == "-dark":
                    page.get_by_text("Details").click()
                page.mouse.move(0, 0)
                page.screenshot(path=folder / f"endpoint-page{name}.png")


if __name__ == "__main__":
    take_pictures(sys.argv[1], Path("docs"))
