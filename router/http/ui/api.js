// Asking the router: with the key, where it wants one.

const KEY = "baton-api-key";

/** The answer is not what was asked for. `status` is that of HTTP. */
class RouterError extends Error {
  constructor(message, status, retryAfter = null) {
    super(message);
    this.status = status;
    this.retryAfter = retryAfter;
  }
}

function apiKey() {
  return sessionStorage.getItem(KEY) ?? "";
}

/** Raises RouterError for an answer that is an error; what `fetch` raises where there is none. Paths are relative. */
async function ask(path, { body = null, signal = null } = {}) {
  const headers = {};
  if (apiKey()) headers["Authorization"] = `Bearer ${apiKey()}`;
  if (body !== null) headers["Content-Type"] = "application/json";
  const response = await fetch(path, {
    method: body === null ? "GET" : "POST",
    headers,
    body: body === null ? undefined : JSON.stringify(body),
    cache: "no-store",
    signal,
  });
  if (response.ok) return response;
  const error = new RouterError(await errorMessage(response), response.status, response.headers.get("Retry-After"));
  if (error.status === 401) askForKey(apiKey() ? error.message : "");
  throw error;
}

async function errorMessage(response) {
  const text = await response.text();
  try {
    const { error } = JSON.parse(text);
    if (typeof error?.message === "string") return error.message;
  } catch {
    // Something in between answered, in its own words.
  }
  return `HTTP ${response.status}: ${text.slice(0, 200) || response.statusText || "no reason given"}`;
}

/** The data of each server-sent event, as text. */
async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      const parts = (rest + value).split(/\r?\n\r?\n/);
      rest = parts.pop();
      for (const part of parts) {
        const data = part.split(/\r?\n/).filter((line) => line.startsWith("data:"));
        if (data.length) yield data.map((line) => line.slice(5).trimStart()).join("\n");
      }
    }
  } finally {
    reader.cancel().catch(() => {}); // it may have been aborted, which is known to whoever did
  }
}

// --- the key's form ---------------------------------------------------------------------------------------------

function showKeyForm(shown) {
  byId("key-form").hidden = !shown;
  byId("key-button").setAttribute("aria-expanded", String(shown));
}

/** The router answered 401. */
function askForKey(message) {
  const wasHidden = byId("key-form").hidden;
  showKeyForm(true);
  setText(byId("key-error"), message || "This router asks for an API key.");
  const focused = document.activeElement;
  if (wasHidden && (focused === null || focused === document.body || focused === byId("key-button"))) byId("key").focus();
}

/** `changed` is called with each new key. */
function startKeyForm(changed) {
  byId("key-button").addEventListener("click", () => {
    const shown = byId("key-form").hidden;
    showKeyForm(shown);
    if (shown) byId("key").focus();
  });
  byId("key-form").addEventListener("submit", (event) => {
    event.preventDefault();
    const key = byId("key").value.trim();
    // A header takes only some characters; fetch would fail as if there were no router.
    if (!/^[\x21-\x7e]+$/.test(key)) {
      setText(byId("key-error"), "A key has at least one character, and only printable ASCII without spaces.");
      return;
    }
    sessionStorage.setItem(KEY, key);
    byId("key").value = "";
    setText(byId("key-error"), "");
    showKeyForm(false);
    byId("key-button").focus();
    changed();
  });
  byId("key-forget").addEventListener("click", () => {
    sessionStorage.removeItem(KEY);
    byId("key").value = "";
    setText(byId("key-error"), "");
    changed();
  });
}
