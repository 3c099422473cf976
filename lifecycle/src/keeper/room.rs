//! Whether there is room for one more sandbox: its name, what its tenant may have of the node, and the
//! disk that the journal shares with the disks of guests. Never makes anything.

use policy::TenantName;

use crate::acts::free;
use crate::config::Quota;
use crate::error::{Error, Field};
use crate::keeper::Keeper;
use crate::sandbox::{Driver, Wish};
use crate::state::State;
use crate::store::Record;
use crate::threads::{aside, locked};

/// What the sandboxes of a tenant have together.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Taken {
    sandboxes: usize,
    memory_mib: u64,
    vcpus: u64,
    disk: u64,
}

impl Keeper {
    /// Refuses a sandbox whose name is taken, or whose tenant has as much as one may have, or for which
    /// the disk has no room: as things are now, so that nobody's policy is read for nothing.
    pub async fn check_room(&self, wish: &Wish) -> Result<(), Error> {
        if self.handle(&wish.name).is_ok() {
            return Err(Error::Exists(wish.name.clone()));
        }
        let disk = self.0.hypervisors.disk(wish.driver).await;
        self.0.config.quota.holds(&self.taken(&wish.tenant).await, wish, disk)?;
        self.check_reserve().await
    }

    /// Refuses one that has failed, and is to run again, for the same reasons. Its name and its disk are
    /// counted as it is.
    pub(super) async fn check_return(&self, record: &Record) -> Result<(), Error> {
        let mut taken = self.taken(&record.tenant).await;
        taken.sandboxes = taken.sandboxes.saturating_sub(1);
        let wish = Wish {
            name: record.name.clone(),
            tenant: record.tenant.clone(),
            driver: record.driver,
            memory_mib: record.memory_mib,
            vcpus: record.vcpus,
        };
        self.0.config.quota.holds(&taken, &wish, 0)?;
        self.check_reserve().await
    }

    /// Refuses where the disk of the journal has less free than is kept for it.
    async fn check_reserve(&self) -> Result<(), Error> {
        let (dir, reserve) = (self.0.config.state_dir.clone(), self.0.config.state_reserve);
        match aside(move || free(&dir)).await? {
            Some(free) if free < reserve => Err(Error::Reserve { free, reserve }),
            // What cannot be asked is found out by who writes.
            _ => Ok(()),
        }
    }

    /// Memory and processors of what runs or may run; disks of all that are not removed.
    async fn taken(&self, tenant: &TenantName) -> Taken {
        let now = self.0.hypervisors.disk(Driver::Qemu).await;
        let mut taken = Taken::default();
        for handle in locked(&self.0.handles).values().filter(|it| it.record.tenant == *tenant) {
            let record = &handle.record;
            let seen = handle.published.borrow();
            taken.sandboxes += 1;
            if seen.state != State::Failed || seen.doing.is_some() {
                taken.memory_mib += u64::from(record.memory_mib);
                taken.vcpus += u64::from(record.vcpus);
            }
            if record.driver == Driver::Qemu {
                // An earlier version did not note it.
                taken.disk = taken.disk.saturating_add(record.disk.unwrap_or(now));
            }
        }
        taken
    }
}

impl Quota {
    /// Refuses what would be more than a tenant may have. `disk` is the size of the wish's own.
    fn holds(&self, taken: &Taken, wish: &Wish, disk: u64) -> Result<(), Error> {
        if taken.sandboxes >= usize::from(self.sandboxes) {
            return Err(Error::Quota { tenant: wish.tenant.clone(), limit: self.sandboxes });
        }
        let mib = |bytes: u64| bytes >> 20;
        let over = |all: u64, most: u64, field, value: String, unit, setting| {
            let problem = format!(
                "would make {all}{unit} of tenant {}, which is more than the {most}{unit} that one \
                 tenant may have",
                wish.tenant
            );
            let fix = format!("ask for less, remove a sandbox, or have `{setting}` raised");
            Err(Error::Share(Field::new(field, value, &problem, &fix)))
        };
        let memory = taken.memory_mib.saturating_add(u64::from(wish.memory_mib));
        if memory > self.memory_mib {
            let given = format!("{}M", wish.memory_mib);
            return over(memory, self.memory_mib, "memory", given, " MiB", "tenants.memory");
        }
        let vcpus = taken.vcpus.saturating_add(u64::from(wish.vcpus));
        if vcpus > self.vcpus {
            let given = wish.vcpus.to_string();
            return over(vcpus, self.vcpus, "vcpus", given, " processors", "tenants.vcpus");
        }
        let disks = taken.disk.saturating_add(disk);
        if disk > 0 && disks > self.disk {
            let (all, most) = (mib(disks), mib(self.disk));
            return over(all, most, "driver", "qemu".to_owned(), " MiB of disk", "tenants.disk");
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NONE: Quota = Quota {
        sandboxes: u16::MAX,
        memory_mib: u64::MAX,
        vcpus: u64::MAX,
        disk: u64::MAX,
        snapshots: u64::MAX,
    };

    fn wish(driver: Driver) -> Wish {
        Wish {
            name: "demo".parse().unwrap(),
            tenant: "acme".parse().unwrap(),
            driver,
            memory_mib: 256,
            vcpus: 2,
        }
    }

    /// Promise 60.
    #[test]
    fn each_share_holds_up_to_the_last_of_it_and_names_its_setting() {
        let taken = Taken { sandboxes: 3, memory_mib: 512, vcpus: 2, disk: 5 << 20 };
        let disk = 4 << 20;
        for (exact, less, field, setting) in [
            (
                Quota { memory_mib: 768, ..NONE },
                Quota { memory_mib: 767, ..NONE },
                "memory",
                "tenants.memory",
            ),
            (Quota { vcpus: 4, ..NONE }, Quota { vcpus: 3, ..NONE }, "vcpus", "tenants.vcpus"),
            (
                Quota { disk: 9 << 20, ..NONE },
                Quota { disk: 8 << 20, ..NONE },
                "driver",
                "tenants.disk",
            ),
        ] {
            exact.holds(&taken, &wish(Driver::Qemu), disk).unwrap();
            let refused = less.holds(&taken, &wish(Driver::Qemu), disk);
            let Err(Error::Share(refused)) = refused else { panic!("{field}: {refused:?}") };
            assert_eq!(refused.field, field);
            assert!(refused.fix.contains(setting), "{refused:?}");
            less.holds(&Taken::default(), &wish(Driver::Qemu), disk).unwrap();
        }
        let full = Quota { disk: 0, ..NONE };
        full.holds(&taken, &wish(Driver::External), 0).unwrap();
        let refused = Quota { sandboxes: 3, ..NONE }.holds(&taken, &wish(Driver::Qemu), disk);
        assert!(matches!(refused, Err(Error::Quota { limit: 3, .. })));
    }
}
