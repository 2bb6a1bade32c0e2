#!/bin/sh
# A box in plain shell: it is told of one job after another on stdin, and answers on stdout.
while IFS= read -r line; do
    case $line in
    '{"type":"hello"'*)
        echo '{"type":"ready","version":1}'
        ;;
    '{"type":"run"'*)
        # A path with a quote or a backslash in it would need a real JSON parser, such as jq.
        path=$(printf '%s\n' "$line" | sed 's/.*"path":"\([^"]*\)".*/\1/')
        if [ -r "$path" ]; then
            echo "counting $path" >&2 # goes into the worker's log
            printf '{"type":"result","value":%d}\n' "$(wc -w <"$path")"
        else
            printf '{"type":"error","failure":{"type":"NotThere","message":"no file %s"}}\n' "$path"
        fi
        ;;
    esac
done
