#!/bin/bash
# Builds a Debian root with the servers that clients in a guest talk to, and the clients for guests that
# are namespaces: sshd, PostgreSQL, MariaDB, Redis, an SMTP server, Java. Usage: outside.sh DIRECTORY
#
# They are run out of it with chroot, so that no service is installed, enabled or started on this
# machine. From this machine's own apt sources; needs root and mmdebstrap. Delete the directory to
# build with today's Debian.
set -euo pipefail

out=${1:?usage: outside.sh DIRECTORY}
suite=bookworm
packages=git,openssh-server,openssh-client,postgresql,mariadb-server-core,mariadb-client-core,redis-server,python3-aiosmtpd,default-jdk-headless
export LC_ALL=C

sources=$(apt-get indextargets 'Created-By: Packages' 'Origin: Debian' 'Architecture: amd64' \
    --format 'deb $(REPO_URI) $(RELEASE) $(COMPONENT)' | grep -E " $suite(-updates|-security)? main$" | sort -u || true)
[ -n "$sources" ] || { echo "servers: apt has no Debian $suite sources: run apt-get update" >&2; exit 1; }
inputs=$(printf '%s\n' "$sources" "$packages" "$(sha256sum <"$0")" | sha256sum)
[ "$(cat "$out/.stamp" 2>/dev/null)" != "$inputs" ] || { echo "servers: unchanged"; exit 0; }

echo "servers: Debian $suite with $packages"
mkdir -p "$(dirname "$out")"
rm -rf --one-file-system "$out" "$out.new"
mkdir -m 755 "$out.new"
printf '%s\n' "$sources" >"$out.list"
# Java links its manuals into a folder that must be there.
mmdebstrap --mode=root --variant=minbase --include="$packages" \
    --essential-hook='mkdir -p "$1/usr/share/man/man1"' \
    --dpkgopt=force-unsafe-io \
    --dpkgopt='path-exclude=/usr/share/doc/*' --dpkgopt='path-include=/usr/share/doc/*/copyright' \
    --dpkgopt='path-exclude=/usr/share/man/*' --dpkgopt='path-exclude=/usr/share/locale/*' \
    "$suite" "$out.new" "$out.list" </dev/null >"$out.log" 2>&1 || { tail -n 30 "$out.log" >&2; exit 1; }
rm "$out.list" "$out.log"
# Every guest has the same resolver.
rm -f "$out.new/etc/resolv.conf"
echo "nameserver 169.254.100.1" >"$out.new/etc/resolv.conf"
mkdir -p "$out.new/run/sshd" "$out.new/srv"
printf '%s\n' "$inputs" >"$out.new/.stamp"
mv "$out.new" "$out"
echo "servers: ready: $out"
