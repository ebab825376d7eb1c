"""An engine under the debugger, in this process or in its own."""
