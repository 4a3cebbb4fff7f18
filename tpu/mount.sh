#!/usr/bin/env bash
# Mounts a bucket as a folder with Cloud Storage FUSE: tpu/mount.sh gs://BUCKET /FOLDER. Done if it is mounted.
set -euo pipefail

if [ $# -ne 2 ] || [[ $1 != gs://?* ]] || [[ $2 != /?* ]]; then
  echo "usage: tpu/mount.sh gs://BUCKET /FOLDER" >&2
  exit 2
fi
bucket=${1#gs://} folder=$2
bucket=${bucket%/}

install_gcsfuse() {
  local keyring=/usr/share/keyrings/cloud.google.asc source
  source="https://packages.cloud.google.com/apt gcsfuse-$(lsb_release -c -s) main"
  curl -fsSL https://packages.cloud.google.com/apt/doc/apt-key.gpg | sudo -n tee "$keyring" >/dev/null
  echo "deb [signed-by=$keyring] $source" | sudo -n tee /etc/apt/sources.list.d/gcsfuse.list >/dev/null
  sudo -n apt-get update -q
  sudo -n apt-get install -q -y gcsfuse
}

if mountpoint -q "$folder"; then
  there=$(findmnt -n -o SOURCE --mountpoint "$folder")
  if [ "$there" != "$bucket" ]; then
    echo "error: $folder is a mount of $there already, not of $bucket" >&2
    exit 1
  fi
  echo "gs://$bucket is mounted at $folder"
  exit 0
fi
command -v gcsfuse >/dev/null || install_gcsfuse
if ! mkdir -p "$folder" 2>/dev/null || ! [ -w "$folder" ]; then
  sudo -n mkdir -p "$folder"
  sudo -n chown "$(id -u):$(id -g)" "$folder"
fi
# Orbax completes a checkpoint by renaming its folder. A bucket with hierarchical namespace does that at once;
# in another the limit allows it, object by object.
gcsfuse --implicit-dirs --rename-dir-limit=1000000 "$bucket" "$folder"
echo "gs://$bucket is mounted at $folder"
