# What a page's script begins with. It is process 1 of its own processes, in a network of its own.
set -eE -o pipefail
trap 'echo "$page, the block of line $line: $BASH_COMMAND: exit code $?" >&2' ERR
ip link set lo up
mkdir -p /tmp/ray && mount -t tmpfs none /tmp/ray
terminals=()

# Commands in this shell, of which nothing is left where no terminal is open: `block LINE`.
block() {
  line=$1
  . "$blocks/$1.sh" > "$blocks/$1.out"
  if [ -e "$blocks/$1.expected" ]; then
    diff -uZ --label "$page" --label "what is printed" "$blocks/$1.expected" "$blocks/$1.out" >&2
  fi
  if [ "${#terminals[@]}" = 0 ]; then
    nothing_left
  fi
}

# Commands that go on, in another shell: `terminal LINE PATTERN` waits until they have printed PATTERN.
terminal() {
  line=$1
  set -m # a group of processes of its own, as a terminal's, which Ctrl-C interrupts
  bash -e "$blocks/$1.sh" > "$blocks/$1.out" 2>&1 < /dev/null &
  set +m
  local pid=$!
  terminals+=("$pid")
  until grep -qE "$2" "$blocks/$1.out"; do
    if ! kill -0 "$pid" 2> /dev/null; then
      cat "$blocks/$1.out" >&2
      return 1
    fi
    sleep 0.05
  done
}

# What is left of processes beside this one, into `left`.
look() {
  left=
  local folder
  for folder in /proc/[0-9]*; do
    if [ "$folder" != /proc/1 ] && grep -qsE '^State:.[^Z]' "$folder/status"; then
      left+="$folder $(tr '\0' ' ' 2> /dev/null < "$folder/cmdline" || true)"$'\n'
    fi
  done
}

# Waits until nothing is left.
nothing_left() {
  local deadline=$((SECONDS + patience))
  look
  while [ -n "$left" ]; do
    if [ "$SECONDS" -gt "$deadline" ]; then
      printf 'left over:\n%s' "$left" >&2
      return 1
    fi
    sleep 0.1
    look
  done
}

# Ctrl-C in each terminal; then nothing may be left.
end() {
  local pid
  line=end
  for pid in "${terminals[@]}"; do
    kill -INT -- "-$pid" 2> /dev/null || true
  done
  nothing_left
}
