#!/bin/sh
# A box in shell that means no good, for the tests: it floods its pipes, forks, stops itself, or does not read.
read -r hello
echo '{"type":"ready","version":1}'
while IFS= read -r line; do
    what=$(printf '%s' "$line" | head -c 4000 | sed -n 's/.*"what":"\([^"]*\)".*/\1/p')
    case $what in
    flood)
        yes 'out' | head -c 2000000 &
        yes 'err' | head -c 2000000 >&2
        wait
        echo '{"type":"result","value":"flooded"}' ;;
    endless)
        head -c 100000000 /dev/zero | tr '\0' 'x'
        echo
        echo '{"type":"result","value":"after a long line"}' ;;
    huge)
        printf '{"type":"result","value":"'
        head -c 100000000 /dev/zero | tr '\0' 'x'
        echo '"}' ;;
    leave)
        setsid sleep 30 & # has both pipes, and is in no group of ours
        echo '{"type":"result","value":"'$!'"}' ;;
    strand) setsid sleep 30 & exit 5 ;;
    stop) kill -STOP $$ ;;
    still) sleep 60 & wait ;;
    twice)
        id=$(printf '%s' "$line" | sed -n 's/.*"id":"\([^"]*\)".*/\1/p')
        printf '{"type":"result","id":"%s","value":1}\n' "$id"
        printf '{"type":"result","id":"%s","value":2}\n' "$id" ;;
    again) echo '{"type":"result","value":1}'; sleep 0.2; echo '{"type":"result","value":2}' ;;
    nan) echo '{"type":"result","value":NaN}' ;;
    late) echo '{"value": NaN, "type": "result"}' ;;
    cut) echo '{"type":"result","val' ;;
    deep) printf '{"type":"result","value":'; head -c 100000 /dev/zero | tr '\0' '['; echo '}' ;;
    binary) printf '\377\376{"type":"result"}\n'; echo '{"type":"result","value":"text"}' ;;
    longlog)
        printf '{"type":"log","message":"'
        head -c 5000000 /dev/zero | tr '\0' 'x'
        echo '"}'
        echo '{"type":"result","value":"logged"}' ;;
    oddlog) echo '{"type":"log","level":"loud"}'; echo '{"type":"result","value":"logged"}' ;;
    json) # printed, and no frame
        printf '{"rows":"'
        head -c 5000000 /dev/zero | tr '\0' 'x'
        echo '"}'
        sleep 0.2
        echo '{"type":"result","value":"late"}' ;;
    *) echo '{"type":"result","value":"fine"}' ;;
    esac
done
