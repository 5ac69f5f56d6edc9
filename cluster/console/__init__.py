"""The console: a small web page that shows a running cluster. `application` is the page's server, without Ray."""
