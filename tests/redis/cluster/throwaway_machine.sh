# Become a throw-away machine: a root of its own with its own /tmp, /run and /dev, then systemd as its first process.
#
# $1: an empty folder, which nothing outside of these namespaces sees change. $2: a token, the name of the canaries.
# $3: a folder of unit files. $4: the checkout. $5: the command that is to be the first process, when all is well.
#
# It is run as the first process in namespaces of its own. An init system empties /tmp when it boots; so nothing is
# booted before both sides have seen that what is written here is not to be seen there.
set -eu
space=$1 token=$2 units=$3 checkout=$4 first=$5
root=$space/root
refuse() { echo "refused: $1"; exit 3; }

[ "$$" = 1 ] || refuse "this is no process namespace of its own"
mount -t tmpfs -o mode=0755,size=1g tmpfs "$space"
mkdir "$space/upper" "$space/work" "$root"
mount -t overlay overlay -o "lowerdir=/,upperdir=$space/upper,workdir=$space/work" "$root"

for each in tmp var/tmp; do mount -t tmpfs -o mode=1777,size=256m tmpfs "$root/$each"; done
for each in run mnt etc/systemd/system etc/systemd/user; do mount -t tmpfs -o mode=0755,size=256m tmpfs "$root/$each"; done
mount -t tmpfs -o mode=0755,size=1m tmpfs "$root/dev"
for each in null zero full random urandom tty; do touch "$root/dev/$each"; mount --bind "/dev/$each" "$root/dev/$each"; done
mkdir "$root/dev/shm" "$root/dev/pts"
mount -t tmpfs -o mode=1777,size=64m tmpfs "$root/dev/shm"
mount -t proc proc "$root/proc"
mount --bind "$root/proc/sys" "$root/proc/sys"
mount -o remount,bind,ro "$root/proc/sys"
[ ! -e "$root/proc/sysrq-trigger" ] || mount --bind /dev/null "$root/proc/sysrq-trigger"
mount -t sysfs -o ro sysfs "$root/sys"
mount -t cgroup2 cgroup2 "$root/sys/fs/cgroup"

# Only units that are named here are there at all, and no generator makes others; nothing tidies up.
lib=usr/lib/systemd
mount -t tmpfs -o mode=0755,size=16m tmpfs "$root/$lib/system"
for each in basic.target sysinit.target sockets.target slices.target paths.target timers.target shutdown.target \
    umount.target final.target local-fs.target network.target network-online.target multi-user.target exit.target \
    systemd-exit.service dbus.service dbus.socket systemd-journald.service systemd-journald.socket; do
    cp "/$lib/system/$each" "$root/$lib/system/"
done
for each in setup.service setup-dev.service clean.service clean.timer; do
    ln -s /dev/null "$root/etc/systemd/system/systemd-tmpfiles-$each"
done
for each in system-generators system-environment-generators user-generators; do
    [ ! -d "$root/$lib/$each" ] || mount -t tmpfs -o mode=0755,size=1m tmpfs "$root/$lib/$each"
done
for each in systemd-tmpfiles systemd-sysctl systemd-modules-load; do
    for there in "/usr/bin/$each" "/$lib/$each"; do [ ! -e "$there" ] || mount --bind /dev/null "$root$there"; done
done
: > "$root/etc/fstab"
rm -f "$root/etc/machine-id"; echo "${token}" > "$root/etc/machine-id"
cp "$units"/* "$root/etc/systemd/system/"
mkdir "$root/mnt/celery5" "$root/run/dbus" "$root/old"
for each in celery5 services bootsteps examples tests systemd; do cp -a "$checkout/$each" "$root/mnt/celery5/"; done

# The canaries: here they are written, outside nobody may see them.
for each in tmp var/tmp run etc usr root opt; do echo canary > "$root/$each/$token"; done
for each in tmp var/tmp run etc usr root opt; do [ ! -e "/$each/$token" ] || refuse "/$each is not apart"; done
echo "canaries are out"
read -r word
[ "$word" = boot ] || refuse "nobody said that the canaries are not to be seen"

cd "$root"
pivot_root . old
exec chroot . /bin/sh -euc '
    umount -l /old
    [ -z "$(ls /old)" ] || { echo "refused: the old root is still there"; exit 3; }
    [ "$(stat -f -c %T /)" = overlayfs ] && [ "$(stat -f -c %T /tmp)" = tmpfs ] && [ -e "/tmp/$1" ] || {
        echo "refused: this is not the new root"; exit 3; }
    exec setpriv --bounding-set -sys_module,-sys_time,-sys_rawio,-sys_boot,-mknod,-mac_admin,-mac_override,-audit_control \
        env -i container=celery5 PATH=/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin $2
' sh "$token" "$first" </dev/null
