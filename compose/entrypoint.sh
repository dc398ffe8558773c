#!/bin/sh
# Runs a command with the secrets it needs in its environment: for each NAME_FILE below, NAME is what that file holds.
# A password in `command:` or `environment:` would be shown by `docker inspect`, and by `ps` to whoever is on the machine.
set -eu
for name in ASYNCDOCK_INDEX ASYNCDOCK_TOKEN; do
  eval "file=\${${name}_FILE:-}"
  if [ -n "$file" ]; then
    if [ ! -r "$file" ]; then
      echo "asyncdock: ${name}_FILE=$file cannot be read; run compose/setup, which makes it" >&2
      exit 2
    fi
    eval "export $name=\"\$(cat \"\$file\")\""
  fi
done
exec "$@"
