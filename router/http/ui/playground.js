// A conversation with the model, streamed.

const SENTENCE = /[.!?:;。！？\n]\s*$/;
const SPOKEN_CHARACTERS = 240;
const LOOKS = 4; // for the request's record

/** Says a text aloud in sentences, not in tokens: a screen reader could not follow those. */
class Announcer {
  constructor() {
    this.waiting = "";
  }

  add(text) {
    this.waiting += text;
    if (SENTENCE.test(this.waiting) || this.waiting.length > SPOKEN_CHARACTERS) this.flush();
  }

  flush(last = "") {
    const text = `${this.waiting} ${last}`.trim();
    this.waiting = "";
    const log = byId("announcer");
    if (text) log.append(element("span", { text: `${text} ` }));
    while (log.childElementCount > 20) log.firstChild.remove();
  }
}

class Playground {
  /** `refresh()` polls the overview and returns it, or null. */
  constructor(refresh) {
    this.refresh = refresh;
    this.messages = [];
    this.running = null; // AbortController of the answer that is being streamed
    this.model = null;
    this.transcript = byId("transcript");
    this.nothing = this.transcript.firstElementChild;
    this.announcer = new Announcer();
    byId("ask").addEventListener("submit", (event) => {
      event.preventDefault();
      this.send();
    });
    byId("message").addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      if (!this.running) byId("ask").requestSubmit();
    });
    document.addEventListener("keydown", (event) => {
      if (event.key === "Escape" && this.running) this.stop();
    });
    byId("stop").addEventListener("click", () => this.stop());
    byId("clear").addEventListener("click", () => this.clear());
    // A field that does not fit may be among the settings that are folded away.
    byId("ask").addEventListener("invalid", (event) => { event.target.closest("details").open = true; }, true);
  }

  stop() {
    this.running?.abort();
  }

  clear() {
    this.stop();
    this.messages = [];
    this.transcript.replaceChildren(this.nothing);
    setText(byId("progress"), "");
    byId("message").focus();
  }

  /** The first model that the router names; asked for once. */
  async modelName(signal) {
    if (this.model === null) {
      const { data } = await (await ask("v1/models", { signal })).json();
      this.model = data[0].id;
    }
    return this.model;
  }

  body(model) {
    const system = byId("system").value.trim();
    const seed = byId("seed").value;
    return {
      model,
      messages: [...(system ? [{ role: "system", content: system }] : []), ...this.messages],
      stream: true,
      stream_options: { include_usage: true },
      temperature: Number(byId("temperature").value),
      max_completion_tokens: Number(byId("max-tokens").value),
      ...(seed === "" ? {} : { seed: Number(seed) }),
    };
  }

  async send() {
    const content = byId("message").value.trim();
    if (!content || this.running) return;
    const controller = new AbortController();
    const { messages } = this;
    this.running = controller;
    messages.push({ role: "user", content });
    byId("message").value = "";
    this.nothing.remove();
    this.addTurn("user", "You").said.textContent = content;
    const answer = this.addTurn("assistant", "Model");
    answer.turn.setAttribute("aria-busy", "true");
    this.setRunning(true);
    const result = await this.stream(answer, controller.signal);
    answer.turn.removeAttribute("aria-busy");
    if (result.text) messages.push({ role: "assistant", content: result.text });
    else {
      // Nothing was said: the question is no part of the conversation, and may be asked again as it is.
      messages.pop();
      if (result.error && !byId("message").value) byId("message").value = content;
    }
    this.running = null;
    this.setRunning(false);
    this.end(answer, result);
  }

  /** Streams one answer into its turn. Never raises: `error` says what went wrong, `stopped` that somebody stopped it. */
  async stream(answer, signal) {
    const result = { text: "", error: "", stopped: false, id: "", finish: "", usage: null, started: performance.now(), first: null, last: null };
    const text = answer.said.appendChild(document.createTextNode(""));
    setText(byId("progress"), "waiting for the first token");
    try {
      const response = await ask("v1/chat/completions", { body: this.body(await this.modelName(signal)), signal });
      result.id = response.headers.get("X-Baton-Request-Id") ?? "";
      for await (const data of events(response)) {
        if (data === "[DONE]") break;
        this.take(JSON.parse(data), result, text);
      }
    } catch (error) {
      if (signal.aborted) result.stopped = true;
      else if (error instanceof RouterError) result.error = explain(error);
      else result.error = `The answer was cut off: ${error.message}. Is the router there?`;
      if (error.status === 404) this.model = null; // the router may have come back with another one
    }
    return result;
  }

  take(chunk, result, text) {
    if (chunk.error) throw new RouterError(chunk.error.message ?? "the router gave no reason", 200);
    result.id ||= (chunk.id ?? "").replace(/^chatcmpl-/, "");
    result.usage = chunk.usage ?? result.usage;
    const choice = chunk.choices?.[0];
    if (!choice) return;
    result.finish = choice.finish_reason ?? result.finish;
    const piece = choice.delta?.content;
    if (!piece) return;
    result.last = performance.now();
    if (result.first === null) {
      result.first = result.last;
      setText(byId("progress"), `first token after ${duration(result.first - result.started)}`);
    }
    result.text += piece;
    const atEnd = this.isAtEnd();
    text.appendData(piece);
    this.announcer.add(piece);
    if (atEnd) this.toEnd();
  }

  end(answer, result) {
    const atEnd = this.isAtEnd();
    if (!result.text) answer.said.hidden = true;
    if (result.error) answer.turn.append(element("p", { class: "error", text: result.error }));
    if (result.stopped) answer.turn.append(element("p", { class: "muted", text: "stopped" }));
    const figures = element("p", { class: "figures" }, ...figuresOf(result).map((text) => element("span", { text })));
    if (result.id) figures.append(element("span", {}, "request ", element("span", { class: "id", text: result.id })));
    if (figures.childElementCount) answer.turn.append(figures);
    if (atEnd) this.toEnd();
    setText(byId("progress"), "");
    const how = result.error || (result.stopped ? "Stopped." : `Answer complete${result.usage ? `, ${plural(result.usage.completion_tokens, "token")}` : ""}.`);
    this.announcer.flush(how);
    this.showWaterfall(answer, result.id);
  }

  /** Once the router knows where the time went. */
  async showWaterfall(answer, id) {
    let request = null;
    for (let look = 0; id && !request && look < LOOKS; look += 1) {
      if (look) await new Promise((resolve) => setTimeout(resolve, 500)); // one that was stopped ends a moment later
      const overview = await this.refresh();
      request = overview?.recent.find(({ request_id }) => id === request_id);
    }
    if (!request?.stages.length || !answer.turn.isConnected) return;
    const atEnd = this.isAtEnd();
    answer.turn.append(waterfallBar(request.stages, stageSum(request.stages)), stageList(request.stages));
    if (atEnd) this.toEnd();
  }

  addTurn(role, title) {
    const said = element("div", { class: "said" });
    const turn = element("article", { class: `turn ${role}`, "aria-label": title }, element("h3", { text: title }), said);
    this.transcript.append(turn);
    this.toEnd();
    return { turn, said };
  }

  setRunning(running) {
    byId("send").hidden = running;
    const stop = byId("stop");
    const hadFocus = document.activeElement === stop || document.activeElement === byId("send") || document.activeElement === document.body;
    stop.hidden = !running;
    if (hadFocus && (running || document.activeElement === document.body)) (running ? stop : byId("message")).focus();
  }

  isAtEnd() {
    const { scrollHeight, scrollTop, clientHeight } = this.transcript;
    return scrollHeight - scrollTop - clientHeight < 24;
  }

  toEnd() {
    this.transcript.scrollTop = this.transcript.scrollHeight;
  }
}

function explain(error) {
  const later = error.retryAfter ? ` Try again in ${error.retryAfter} s.` : "";
  return `${error.message}${later}`;
}

/** What was measured here, in words. Tokens/s: of those after the first one. */
function figuresOf({ started, first, last, usage, finish }) {
  const figures = [];
  if (first !== null) figures.push(`TTFT ${duration(first - started)}`);
  if (usage) {
    if (usage.completion_tokens > 1 && last > first) {
      figures.push(`${rate((usage.completion_tokens - 1) / ((last - first) / 1000))} tokens/s`);
    }
    const cached = usage.prompt_tokens_details?.cached_tokens;
    figures.push(`${count(usage.prompt_tokens)} tokens in${cached ? ` (${count(cached)} cached)` : ""}, ${count(usage.completion_tokens)} out`);
  }
  if (finish) figures.push(`finish: ${finish}`);
  return figures;
}
