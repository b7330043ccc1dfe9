"""The commands, one module each; `zerocli.cli` imports a module only when its command is asked for."""
