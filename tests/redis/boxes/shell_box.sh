#!/bin/sh
# A box in shell that does what it is told, for the tests; written to make every mistake there is.
while IFS= read -r line; do
    what=$(printf '%s\n' "$line" | sed -n 's/.*"what":"\([^"]*\)".*/\1/p')
    n=$(printf '%s\n' "$line" | sed -n 's/.*"n":\([0-9]*\).*/\1/p')
    case $line in
    '{"type":"hello"'*) printf '{"type":"ready","version":1}\n' ;;
    *) case $what in
        progress)
            printf '{"type":"progress","done":-1}\n'
            printf '{"type":"progress","done":1,"total":2}\n'
            sleep 2
            printf '{"type":"result","value":"done"}\n' ;;
        double) printf '{"type":"result","value":%d}\n' $((2 * n)) ;;
        noise)
            echo 'a word in between'
            echo '{"type":"greeting","text":"of a later version"}'
            echo '{"type":"log","level":"warning","message":"mind the gap","fields":{"gap":3,"worker":"me"}}'
            head -c 5000000 /dev/zero | tr '\0' 'x'
            echo
            printf '{"type":"result","id":"another","value":0}\n'
            printf '{"type":"result","value":"done"}\n' ;;
        large) printf '{"type":"result","value":"'; head -c 5000000 /dev/zero | tr '\0' 'x'; printf '"}\n' ;;
        malformed) printf '{"type":"error","failure":"no"}\n' ;;
        fail) printf '{"type":"error","failure":{"type":"shell.NotThere","message":"no such thing"}}\n' ;;
        reject) printf '{"type":"reject","why":"closed on Sundays"}\n' ;;
        crash) echo 'some words' >&2; echo 'last words' >&2; exit "$n" ;;
        wait) echo $$ >"$n"; sleep 60 ;;
        close) exec >&-; sleep 60 ;;
        esac ;;
    esac
done
