"""Where KV bytes lie (planes) and which of them move (copy plans). Pure: no engine, no memory."""
