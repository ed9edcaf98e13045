#!/usr/bin/env bash
# Installs StarCraft II for Linux from Blizzard, and the maps of SMAC and SMACv2 from oxwhirl's repositories.
#
#   ./install_sc2.sh --password PASSWORD      the game (4.10) and the maps
#   ./install_sc2.sh --version 4.6.2 ...      another version: SC2PATH must name a folder of its own
#   ./install_sc2.sh --maps-only              the maps alone
#   --sha256 SUM    the only sum that the game's archive may have   --keep   leave the archive there
#
# Blizzard protects the archive with the password 'iagreetotheeula': by typing it in you agree to the AI and Machine
# Learning License, https://blzdistsc2-a.akamaihd.net/AI_AND_MACHINE_LEARNING_LICENSE.html. Without --password you are
# asked for it. What is there already is not fetched again; an interrupted download continues where it stopped.
# The archive's sha256 is compared with --sha256, else with scripts/sc2_archives.txt, else with what the first
# installation has recorded in SC2PATH/omagd_sha256.txt; there the game's program is recorded too, and checked each time.
# Variables: SC2PATH (where to, ~/StarCraftII), SC2_GAME_URL and SC2_MAPS_URL (mirrors), https_proxy (as curl reads it)
# Exit codes: 0 done, 2 a mistake in the call or something missing here, 3 a download failed, 4 a wrong checksum
set -euo pipefail
# shellcheck source=scripts/lib.sh
. "$(dirname -- "${BASH_SOURCE[0]}")/scripts/lib.sh"

readonly NETWORK=3 CHECKSUM=4
game_url=${SC2_GAME_URL:-https://blzdistsc2-a.akamaihd.net/Linux}
maps_url=${SC2_MAPS_URL:-https://raw.githubusercontent.com}
sc2=${SC2PATH:-$HOME/StarCraftII}
sc2=${sc2%/}
version=4.10 maps_only='' password='' wanted='' keep=''

read_options() { # arguments of the script
    while [ $# -gt 0 ]; do
        case $1 in
        --maps-only) maps_only=1 ;;
        --keep) keep=1 ;;
        --version | --password | --sha256)
            [ $# -ge 2 ] || fail "$1 wants a value; see --help"
            case $1 in
            --version) version=$2 ;;
            --password) password=$2 ;;
            --sha256) wanted=$2 ;;
            esac
            shift
            ;;
        -h | --help) usage && exit 0 ;;
        *) fail "$1: no such option; see --help" ;;
        esac
        shift
    done
}

need() { # programs: fails if one is missing
    local name
    for name in "$@"; do
        command -v "$name" >/dev/null 2>&1 || fail "$name is missing here (on Debian: apt install $name)"
    done
}

sum_of() { # file: its sha256
    sha256sum -- "$1" | cut -d ' ' -f 1
}

transfer() { # url, file, more options of curl: fetches; what curl complains about goes to $said
    local url=$1 file=$2
    shift 2
    if [ -t 2 ]; then
        curl -fL --progress-bar --retry 3 --connect-timeout 20 "$@" -o "$file" -- "$url" # tells its troubles itself
    else
        curl -fL -sS --retry 3 --connect-timeout 20 "$@" -o "$file" -- "$url" 2>"$said"
    fi
}

download() { # url, file: downloads to file.part, continues one that is there, and renames it when it is complete
    local url=$1 file=$2 code=0 why
    transfer "$url" "$file.part" -C - || code=$?
    case $code in 22 | 33 | 36) # perhaps the server cannot go on where we are: from the beginning
        if [ -s "$file.part" ]; then
            rm -f -- "$file.part"
            code=0
            transfer "$url" "$file.part" || code=$?
        fi
        ;;
    esac
    if [ "$code" -ne 0 ]; then
        why=$(sed -n 's/^curl: ([0-9]*) //p' "$said" | tail -n 1)
        fail "cannot fetch $url: ${why:-curl ended with $code}. Behind a proxy set https_proxy; then run this again" "$NETWORK"
    fi
    mv -- "$file.part" "$file"
}

choose_build() { # sets archive and build of $version
    case $version in
    4.10) archive=SC2.4.10.zip build=75689 ;;
    4.6.2) archive=SC2.4.6.2.69232.zip build=69232 ;;
    *) fail "--version $version: this installs 4.10 or 4.6.2; others by hand: https://github.com/Blizzard/s2client-proto#downloads" ;;
    esac
}

ask_password() { # sets password; typing it means to agree
    if [ -z "$password" ] && [ -t 0 ]; then
        printf 'License: https://blzdistsc2-a.akamaihd.net/AI_AND_MACHINE_LEARNING_LICENSE.html\n' >&2
        printf "If you agree to it, type iagreetotheeula: " >&2
        read -r password
    fi
    [ -n "$password" ] || fail "the game's archive has a password, by which you agree to Blizzard's license: --password iagreetotheeula"
}

unpack() { # archive file: puts the game it holds into $sc2
    local fresh=$sc2.new
    rm -rf -- "$fresh"
    mkdir -p -- "$fresh"
    unzip -q -o -P "$password" "$1" -d "$fresh" >/dev/null 2>&1 || {
        rm -rf -- "$fresh"
        fail "$1 cannot be unpacked: wrong password, no space, or a broken file (its sha256 is $(sum_of "$1"))" "$CHECKSUM"
    }
    [ -f "$fresh/StarCraftII/Versions/Base$build/SC2_x64" ] || fail "$1 holds no StarCraftII/Versions/Base$build/SC2_x64"
    mkdir -p -- "$sc2"
    cp -a -- "$fresh/StarCraftII/." "$sc2/"
    chmod +x -- "$sc2/Versions/Base$build/SC2_x64"
    rm -rf -- "$fresh"
}

listed_sum() { # list of "sum name" lines, name: prints the sum, nothing where there is none
    [ ! -f "$1" ] || awk -v name="$2" '$1 !~ /^#/ && $2 == name { print $1; exit }' "$1"
}

record_sums() { # sum and name, again and again: replaces what omagd_sha256.txt says of these names
    local list=$sc2/omagd_sha256.txt lines=''
    [ -w "$sc2" ] || return 0 # an installation of another user
    while [ $# -gt 0 ]; do
        [ ! -f "$list" ] || lines=$(awk -v name="$2" '$2 != name' "$list")
        printf '%s%s  %s\n' "${lines:+$lines
}" "$1" "$2" >"$said"
        install -m 644 -- "$said" "$list"
        shift 2
    done
}

check_archive() { # file: sets sum and note; fails where the file is not the archive that it should be
    local expected=$wanted source=--sha256
    sum=$(sum_of "$1")
    if [ -z "$expected" ]; then
        expected=$(listed_sum "$root/scripts/sc2_archives.txt" "$archive") source=scripts/sc2_archives.txt
    fi
    if [ -z "$expected" ]; then
        expected=$(listed_sum "$sc2/omagd_sha256.txt" "$archive") source="$sc2/omagd_sha256.txt, recorded when it was first installed"
    fi
    note=", equal to $source"
    if [ -z "$expected" ]; then
        note=', recorded: there is no published one to compare it with'
    elif [ "$sum" != "$expected" ]; then
        fail "$1 has sha256 $sum, not $expected ($source): remove it and run this again, or give --sha256 $sum if you trust it" "$CHECKSUM"
    fi
}

check_program() { # fails where the installed program is not the one that was recorded; records one that was not
    local program=Versions/Base$build/SC2_x64 recorded sum
    recorded=$(listed_sum "$sc2/omagd_sha256.txt" "$program")
    sum=$(sum_of "$sc2/$program")
    if [ -z "$recorded" ]; then
        record_sums "$sum" "$program"
    elif [ "$sum" != "$recorded" ]; then
        fail "$sc2/$program has sha256 $sum, not $recorded as recorded when it was installed: remove $sc2/Versions/Base$build and run this again" "$CHECKSUM"
    fi
    printf 'game:  %s is there (%s), %s sha256 %s\n' "$version" "$sc2" "$program" "$sum"
}

install_game() {
    local other file sum note program
    choose_build
    program=Versions/Base$build/SC2_x64
    if [ -x "$sc2/$program" ]; then
        check_program
        return
    fi
    [ "$(uname -s)" = Linux ] || fail "Blizzard's package, which sc2 needs, is for Linux only"
    other=$(find "$sc2/Versions" -maxdepth 1 -name 'Base*' 2>/dev/null | head -n 1 || true)
    [ -z "$other" ] || fail "$sc2 holds another version ($(basename -- "$other")); give this one a folder: SC2PATH=$sc2-$version"
    need unzip
    ask_password
    mkdir -p -- "$(dirname -- "$sc2")"
    file=$sc2.$archive
    if [ ! -f "$file" ]; then
        printf 'fetching %s/%s (about 4 GB) ...\n' "$game_url" "$archive" >&2
        download "$game_url/$archive" "$file"
    fi
    check_archive "$file"
    unpack "$file"
    record_sums "$sum" "$archive" "$(sum_of "$sc2/$program")" "$program"
    [ -n "$keep" ] || rm -f -- "$file"
    printf 'game:  %s in %s (archive sha256 %s%s)\n' "$version" "$sc2" "$sum" "$note"
}

install_maps() {
    local folder=$sc2/Maps/SMAC_Maps sum size place file fetched=0 there=0
    mkdir -p -- "$folder"
    while read -r sum size place; do
        case $sum in '#'*) continue ;; esac
        file=$folder/$(basename -- "$place")
        if [ -f "$file" ] && [ "$(sum_of "$file")" = "$sum" ]; then
            there=$((there + 1))
            continue
        fi
        download "$maps_url/$place" "$file.new"
        if [ "$(sum_of "$file.new")" != "$sum" ]; then
            rm -f -- "$file.new"
            fail "$maps_url/$place is not the published map: another sha256 than $sum ($size bytes)" "$CHECKSUM"
        fi
        if [ -f "$file" ]; then mv -- "$file" "$file.old"; fi
        mv -- "$file.new" "$file"
        fetched=$((fetched + 1))
    done <"$root/scripts/sc2_maps.txt"
    printf 'maps:  %d fetched, %d were there (%s)\n' "$fetched" "$there" "$folder"
}

read_options "$@"
need curl sha256sum
said=$(mktemp)
trap 'rm -f -- "$said"' EXIT
[ -n "$maps_only" ] || install_game
install_maps
[ "$sc2" = "$HOME/StarCraftII" ] || printf 'next:  export SC2PATH=%q\n' "$sc2"
