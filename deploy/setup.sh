#!/usr/bin/env bash
# Installs the Debian packages and cargo tools that building, testing, the demo and the benches need,
# and nothing that is there already. Usage: deploy/setup.sh run|test|bench. As root, on Debian 12.
set -euo pipefail

say() { printf 'setup: %s\n' "$*"; }
die() { printf 'setup: %s\n' "$*" >&2; exit 1; }

[ "$(id -u)" = 0 ] || die "run as root: Postern makes network namespaces, taps and nftables rules"
command -v apt-get >/dev/null || die "this needs Debian 12 (apt-get not found)"
command -v cargo >/dev/null || die "a Rust toolchain is missing: install rustup, then run this again"

# command it brings : Debian package
run="cc:gcc ip:iproute2 nft:nftables qemu-system-x86_64:qemu-system-x86 qemu-img:qemu-utils
     mmdebstrap:mmdebstrap mke2fs:e2fsprogs cpio:cpio setpriv:util-linux unshare:util-linux modinfo:kmod zstd:zstd curl:curl
     openssl:openssl python3:python3"
test="$run tcpdump:tcpdump git:git dig:dnsutils jq:jq ps:procps ping:iputils-ping musl-gcc:musl-tools iodine:iodine
      pip3:python3-pip ssh:openssh-client
      nginx:nginx-light haproxy:haproxy node:nodejs gunicorn:gunicorn waitress-serve:python3-waitress"
bench="$run haproxy:haproxy nginx:nginx-light sniproxy:sniproxy unbound:unbound dnsdist:dnsdist dnsmasq:dnsmasq-base"

case "${1:-}" in
  run) wanted=$run ;;
  test) wanted=$test ;;
  bench) wanted=$bench ;;
  *) die "usage: deploy/setup.sh run|test|bench" ;;
esac

missing=()
[ -e /usr/include/stdio.h ] || missing+=(libc6-dev)
for pair in $wanted; do
  command -v "${pair%%:*}" >/dev/null || missing+=("${pair##*:}")
done

if [ "$1" = bench ] && [ ! -e /usr/lib/nginx/modules/ngx_stream_module.so ]; then
  missing+=(libnginx-mod-stream)
fi

if [ ${#missing[@]} -gt 0 ]; then
  say "installing ${missing[*]}"
  export DEBIAN_FRONTEND=noninteractive
  # Servers that tests and benches start by themselves are not to serve this machine, now or at boot.
  stay=/usr/sbin/policy-rc.d
  if [ ! -e "$stay" ]; then
    trap 'rm -f "$stay"' EXIT
    printf '#!/bin/sh\nexit 101\n' >"$stay"
    chmod 755 "$stay"
  fi
  apt-get -qq update
  # A qemu-utils from another release keeps this release's qemu away: then both come from this one.
  apt-get -qq install -y --no-install-recommends "${missing[@]}" >/dev/null ||
    apt-get -qq install -y --no-install-recommends --allow-downgrades "${missing[@]}" \
      "qemu-utils/$(. /etc/os-release && echo "$VERSION_CODENAME")" >/dev/null ||
    die "apt-get could not install ${missing[*]}"
  for unit in nginx haproxy sniproxy unbound dnsdist; do
    [[ " ${missing[*]} " != *" $unit"* ]] || systemctl disable -q "$unit" 2>/dev/null || true
  done
fi

if [ "$1" = test ]; then
  command -v cargo-deny >/dev/null || { say "installing cargo-deny"; cargo install -q --locked cargo-deny@0.20.2; }
  # A server that speaks S3.
  command -v moto_server >/dev/null || {
    say "installing moto"
    pip3 install -q --break-system-packages --root-user-action=ignore 'moto[server]==5.2.1'
  }
  command -v cargo-fuzz >/dev/null || { say "installing cargo-fuzz"; cargo install -q --locked cargo-fuzz@0.13.2; }
fi
say "ready"
