"""HTTP at the router: OpenAI's API, operations, the page."""
