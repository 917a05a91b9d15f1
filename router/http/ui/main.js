// Polls the overview while somebody may see it.

const POLL_S = 1;
const MOST_WAIT_S = 8;
const POLL_TIMEOUT_MS = 5000;

class Poller {
  /** `show(overview, at)` gets what came. */
  constructor(show) {
    this.show = show;
    this.timer = null;
    this.asking = null;
    this.failures = 0;
    this.shownAt = null; // seconds on the page's clock
    this.nextAt = null;
    this.paused = false;
    this.needsKey = false;
    document.addEventListener("visibilitychange", () => (document.hidden ? this.rest() : this.now()));
    byId("try-now").addEventListener("click", () => this.now());
    byId("pause").addEventListener("click", () => this.setPaused(!this.paused));
    setInterval(() => this.tell(), 500);
  }

  setPaused(paused) {
    this.paused = paused;
    byId("pause").setAttribute("aria-pressed", String(paused));
    if (paused) this.rest();
    else this.now();
    this.tell();
  }

  /** Ask at once, and go on as is due. Returns the overview; null if there is none. */
  async now() {
    this.rest();
    this.asking ??= this.poll().finally(() => { this.asking = null; });
    const overview = await this.asking;
    this.rest();
    if (!this.paused && !this.needsKey && !document.hidden) {
      const wait = this.failures ? Math.min(2 ** (this.failures - 1), MOST_WAIT_S) : POLL_S;
      this.nextAt = performance.now() / 1000 + wait;
      this.timer = setTimeout(() => this.now(), wait * 1000);
    }
    this.tell();
    return overview;
  }

  rest() {
    clearTimeout(this.timer);
    this.timer = this.nextAt = null;
  }

  async poll() {
    try {
      const overview = await (await ask("baton/overview", { signal: AbortSignal.timeout(POLL_TIMEOUT_MS) })).json();
      this.failures = 0;
      this.needsKey = false;
      this.trouble = "";
      this.shownAt = performance.now() / 1000;
      this.show(overview, this.shownAt);
      return overview;
    } catch (error) {
      this.needsKey = error.status === 401;
      this.failures = this.needsKey ? 0 : this.failures + 1;
      if (this.needsKey) this.trouble = "";
      else if (error instanceof RouterError) this.trouble = `The router answered with an error: ${error.message}`;
      else this.trouble = "Router not reachable.";
      return null;
    }
  }

  tell() {
    const now = performance.now() / 1000;
    const stale = this.shownAt !== null && (Boolean(this.trouble) || this.needsKey);
    document.body.classList.toggle("stale", stale);
    byId("trouble").hidden = !this.trouble;
    if (this.trouble) {
      setText(byId("trouble-text"), `${this.trouble}${this.shownAt === null ? "" : " The figures below are old."}`);
      setAttribute(byId("health"), "data-state", "bad");
      setText(byId("health"), "not reachable");
    }
    const age = this.shownAt === null ? null : now - this.shownAt;
    let text = age === null ? "" : age < 3 ? "live" : `as of ${span(age)} ago`;
    if (this.paused) text = `paused${age === null ? "" : `, ${text}`}`;
    else if (this.trouble && this.nextAt !== null) text += `${text && ", "}next try in ${Math.max(0, Math.ceil(this.nextAt - now))} s`;
    setText(byId("freshness"), text);
  }
}

const overview = new Overview();
const poller = new Poller((data, at) => overview.show(data, at));
const playground = new Playground(() => poller.now());
startKeyForm(() => poller.now());
poller.now();
